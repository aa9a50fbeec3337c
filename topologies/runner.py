"""Real traffic in a lab: the controller, shadow nodes and rings; then what both ends saw, compared."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkmate.jobs import read_job
from topologies import traffic
from topologies.crew import Crew, Member
from topologies.describe import CONTROLLER, LabError
from topologies.lab import Lab
from topologies.steps import Steps
from topologies.traffic import Load
from topologies.verdict import Digest, ReadKey, StreamKey, Verdict, compare

CHECKMATE: Final = (sys.executable, "-m", "checkmate.cli.entry")
_START_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 30.0
_QUIET_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.25


@dataclass(frozen=True)
class Outcome:
    """What came of a run: the verdict, what each rank says, and each switch (`checkmate status --json`)."""

    verdict: Verdict
    ranks: list[dict[str, Any]]
    switches: list[dict[str, Any]]

    @property
    def good(self) -> bool:
        """Whether every stream is equal at both ends, and the tagger never failed."""
        return self.verdict.equal and not any(sum(rank["faults"].values()) for rank in self.ranks)

    def data(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        kept = ("rank", "goodput_bits_per_second", "retransmitted_segments", "verified", "faults")
        ranks = [{key: rank[key] for key in kept} for rank in self.ranks]
        return {"good": self.good} | self.verdict.data() | {"ranks": ranks, "switches": self.switches}


class Traffic:
    """One run in a lab that is up. `LabError` quotes the process that failed."""

    def __init__(self, lab: Lab, load: Load, steps: Steps) -> None:
        self._lab = lab
        self._load = load
        self._steps = steps
        self._job = read_job(lab.job_file)
        self._crew = Crew(lab)
        self._copies = traffic.gathered(self._job, load) * self._job.replicas

    def run(self) -> Outcome:
        """Controller, shadow nodes, rings, in this order; then compare."""
        self._steps("controller writes the job to the switches")
        controller = self._serve()
        self._steps("shadow nodes connect their streams")
        shadows = self._start_shadows()
        self._await_streams(shadows)
        self._steps(f"rings gather {self._load.nbytes / 1e6:,.0f} MB of tensors")
        ranks = self._start_rings()
        self._crew.finish(ranks, self._load.seconds, self._watch(shadows))
        self._steps("shadow nodes read to the end")
        self._await_end(shadows)
        status = self._checkmate("status", "--json", self._lab.job_file)  # counters go with the streams
        for member in shadows:
            self._crew.stop(member)
        self._crew.stop(controller)
        results = [self._result(member) for member in ranks]
        return Outcome(self._judge(results, shadows), results, list(json.loads(status).values()))

    def _serve(self) -> Member:
        controller = self._crew.start(
            "controller", CONTROLLER, [*CHECKMATE, "run", "--no-view", self._lab.job_file]
        )
        self._crew.wait(
            lambda: "serving" in controller.output.read_text(), "controller to serve", _START_SECONDS
        )
        return controller

    def _start_shadows(self) -> list[Member]:
        sinks = traffic.sinks(self._job, self._lab.topology, self._load)
        return [self._start_host(host, "shadow", sink) for host, sink in sinks.items()]

    def _start_rings(self) -> list[Member]:
        members = []
        for index, group in enumerate(self._job.dp_groups):
            ring = traffic.ring(self._job, index, self._load)
            for place, rank in enumerate(group.ranks):
                members.append(self._start_host(f"rank{rank.rank}", "ring", ring, "--rank", str(place)))
        return members

    def _start_host(self, host: str, module: str, config: dict[str, Any], *more: str) -> Member:
        """Start a rank or a sink with its configuration, and a file for its result."""
        file = self._lab.directory / f"{host}.config.json"
        file.write_text(json.dumps(config))
        argv = [sys.executable, "-m", f"checkmate.{module}", "--config", str(file)]
        result = str(self._result_file(host))
        return self._crew.start(host, host, [*argv, "--result", result, *more])

    def _result_file(self, host: str) -> Path:
        return self._lab.directory / f"{host}.result.json"

    def _result(self, member: Member) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._result_file(member.name).read_text())
        except FileNotFoundError:
            raise LabError(f"{member.name} ended without a result: {member.last_words()}") from None
        return found

    def _await_streams(self, shadows: Sequence[Member]) -> None:
        """Both sides must say so: each shadow node of its streams, and the switches of all."""
        self._crew.wait(
            lambda: all("ready" in member.output.read_text() for member in shadows),
            "shadow nodes to connect their streams",
            _CONNECT_SECONDS,
        )
        self._checkmate("status", "--wait", "--timeout", f"{_CONNECT_SECONDS:g}", self._lab.job_file)

    def _checkmate(self, *arguments: str | Path) -> str:
        """A `checkmate` command beside the controller; its output."""
        return self._crew.run("status", CONTROLLER, [*CHECKMATE, *arguments], _START_SECONDS)

    def _watch(self, shadows: Sequence[Member]) -> Callable[[], None]:
        """Shows how much the shadow nodes have read, a few times a second."""
        looked = 0.0

        def look() -> None:
            nonlocal looked
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                self._steps.moved(_received(shadows), self._copies)

        return look

    def _await_end(self, shadows: Sequence[Member]) -> None:
        """Wait until all copies are read, or no more come: a ring ends when its switch has had everything."""
        read, since = -1, time.monotonic()

        def ended() -> bool:
            nonlocal read, since
            if (now := _received(shadows)) != read:
                read, since = now, time.monotonic()
            return read >= self._copies or time.monotonic() - since > _QUIET_SECONDS

        self._crew.wait(ended, "shadow nodes to read to the end", self._load.seconds)

    def _judge(self, ranks: Sequence[dict[str, Any]], shadows: Sequence[Member]) -> Verdict:
        tagged: dict[StreamKey, Digest] = {}
        read: dict[ReadKey, Digest] = {}
        seconds = 0.0
        for result in ranks:
            seconds = max(seconds, sum(result["seconds"]))
            for s in result["streams"]:
                tagged[s["boundary"], s["channel"], s["shadow_id"]] = Digest(s["bytes"], s["sha256"])
        for member in shadows:
            node = self._lab.topology.host(member.name).number
            for s in self._result(member)["streams"]:
                read[s["boundary"], s["channel"], s["shadow_id"], node] = Digest(s["bytes"], s["sha256"])
        return Verdict(compare(self._job, tagged, read), seconds, traffic.gathered(self._job, self._load))


def _received(sinks: Sequence[Member]) -> int:
    """What sinks have said last of the bytes that they have read."""
    total = 0
    for member in sinks:
        # Up to the last line's end: it may be half written.
        whole = member.output.read_text().rpartition("\n")[0]
        said = [line for line in whole.splitlines() if line.startswith("received ")]
        total += int(said[-1].split()[1]) if said else 0
    return total
