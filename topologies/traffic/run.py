"""Real traffic in a lab: shadow nodes and rings; then what both ends saw, compared.

with Lab(load("single_tor")) as lab, Crew(lab) as crew, serving(crew):
    outcome = Traffic(crew, Load()).run()
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from checkmate.job.files import read_job
from topologies.controller import await_streams
from topologies.controller import status as read_status
from topologies.crew import Crew, Member
from topologies.describe.topology import LabError
from topologies.progress import StepProgress
from topologies.traffic import orders
from topologies.traffic.orders import Load, SinkTail
from topologies.traffic.port_drops import PortDrops, port_drops
from topologies.traffic.verdict import Digest, ReadKey, StreamKey, Verdict, compare

_CONNECT_SECONDS: Final = 60.0
_QUIET_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.25


@dataclass(frozen=True)
class Outcome:
    """What came of a run: the verdict, what each rank says, and each switch (`checkmate status --json`).

    `port_drops`: what switches lost for good at their ports, which their counters in P4 can't tell.
    """

    verdict: Verdict
    ranks: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    port_drops: list[PortDrops]

    @property
    def good(self) -> bool:
        """Whether every stream is equal at both ends, and the tagger never failed."""
        return self.verdict.equal and not self.faults

    @property
    def faults(self) -> set[str]:
        """At what the tagger has failed."""
        return {name for rank in self.ranks for name, count in rank["faults"].items() if count}

    @property
    def seconds(self) -> tuple[float, ...]:
        """How long each iteration took the slowest rank."""
        return tuple(max(times) for times in zip(*(rank["seconds"] for rank in self.ranks), strict=True))

    @property
    def retransmitted(self) -> int:
        """How many segments ranks have sent again."""
        return sum(rank["retransmitted_segments"] for rank in self.ranks)

    def goodput(self) -> float:
        """Gbit/s that each rank sends, over all iterations but the first, in which windows open."""
        each = self.ranks[0]["sent_bytes"] / len(self.seconds)
        return float(8e-9 * each * len(self.seconds[1:]) / sum(self.seconds[1:]))

    def data(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        kept = ("rank", "goodput_bits_per_second", "retransmitted_segments", "verified", "faults")
        ranks = [{key: rank[key] for key in kept} for rank in self.ranks]
        drops = [asdict(drop) for drop in self.port_drops]
        more = {"ranks": ranks, "switches": self.switches, "port_drops": drops}
        return {"good": self.good} | self.verdict.data() | more


class Traffic:
    """One run in a lab whose controller serves. `LabError` quotes the process that failed.

    `run` is `connect`, `gather` and `finish`; a test may come between.
    """

    def __init__(self, crew: Crew, load: Load, steps: StepProgress | None = None) -> None:
        self.crew = crew
        self.lab = crew.lab
        self.shadows: list[Member] = []
        self.ranks: list[Member] = []
        self.load = load
        self._steps = steps or StepProgress(Console(quiet=True))
        self.job = read_job(self.lab.job_file)
        gathered = orders.gathered(self.job, load) if load.tagged else 0
        self.copies = gathered * self.job.replicas
        """How many bytes the shadow nodes are to read."""

    def run(self, tick: Callable[[int], None] = lambda _: None) -> Outcome:
        """Shadow nodes and rings, in this order; then compare. `tick` gets the bytes read so far."""
        self.connect()
        self.gather(tick)
        return self.finish()

    def connect(self) -> None:
        """Start the shadow nodes, and wait until all streams are connected."""
        if not self.load.tagged:
            return
        self._steps("shadow nodes connect their streams")
        sinks = orders.sinks(self.job, self.lab.topology, self.load)
        self.shadows = [self.start_host(host, "sink_main", sink) for host, sink in sinks.items()]
        self.await_ready(self.shadows)
        await_streams(self.crew)

    def gather(self, tick: Callable[[int], None] = lambda _: None) -> None:
        """Run the rings to their end."""
        self._steps(f"rings gather {self.load.nbytes / 1e6:,.0f} MB of tensors")
        for index, group in enumerate(self.job.dp_groups):
            ring = orders.ring(self.job, index, self.load)
            self.ranks += [
                self.start_host(f"rank{rank.rank}", "rank_main", ring, "--rank", str(place))
                for place, rank in enumerate(group.ranks)
            ]
        self.crew.finish(self.ranks, self.load.seconds, self._watch(tick))

    def join(self, left: Member, place: SinkTail) -> Member:
        """In place of a shadow node that has left, start one that joins its streams at a place ahead.

        Of its streams, the verdict isn't equal then; their tails are in what the ranks say.
        """
        sink = orders.sinks(self.job, self.lab.topology, self.load, place)[left.name]
        self.copies -= sum(stream["base"] for stream in sink["streams"])
        joined = self.start_host(left.name, "sink_main", sink)
        self.shadows[self.shadows.index(left)] = joined
        self.await_ready([joined])
        return joined

    def finish(self, quiet: float = _QUIET_SECONDS) -> Outcome:
        """Wait until the shadow nodes have read to the end, and end them; what both ends saw.

        Where copies are missing, it gives them up `quiet` seconds after the last that came.
        """
        status: list[dict[str, Any]] = []
        ended = time.time()
        if self.shadows:
            self._steps("shadow nodes read to the end")
            self._await_end(quiet)
            ended = time.time()
            status = read_status(self.crew)  # counters go with the streams
        for member in self.shadows:
            self.crew.stop(member)
        ranks = [self.result(member) for member in self.ranks]
        return Outcome(self._judge(ranks), ranks, status, port_drops(self.lab, since=ended))

    def start_host(self, host: str, module: str, config: dict[str, Any], *more: str) -> Member:
        """Start a rank or a sink with its configuration, and a file for its result."""
        file = self.lab.directory / f"{host}.config.json"
        file.write_text(json.dumps(config))
        self._result_file(host).unlink(missing_ok=True)
        argv = [sys.executable, "-m", f"topologies.traffic.{module}", "--config", str(file)]
        return self.crew.start(host, host, [*argv, "--result", str(self._result_file(host)), *more])

    def await_ready(self, shadows: Sequence[Member]) -> None:
        """Wait until these sinks say that their streams are connected."""
        self.crew.wait(
            lambda: all("ready" in member.said() for member in shadows),
            "shadow nodes to connect their streams",
            _CONNECT_SECONDS,
        )

    def result(self, member: Member) -> dict[str, Any]:
        """What a rank or a sink that has ended says of itself."""
        try:
            found: dict[str, Any] = json.loads(self._result_file(member.name).read_text())
        except FileNotFoundError:
            raise LabError(f"{member.name} ended without a result: {member.last_words()}") from None
        return found

    def received(self) -> int:
        """How many bytes the shadow nodes have read so far."""
        return sum(map(received_by, self.shadows))

    def _result_file(self, host: str) -> Path:
        return self.lab.directory / f"{host}.result.json"

    def _watch(self, tick: Callable[[int], None]) -> Callable[[], None]:
        """Tells how much the shadow nodes have read, a few times a second."""
        looked = 0.0

        def look() -> None:
            nonlocal looked
            if self.shadows and time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                received = self.received()
                self._steps.moved(received, self.copies)
                tick(received)

        return look

    def _await_end(self, quiet: float) -> None:
        """Wait until all copies are read, or no more come: a ring ends when its switch has had everything."""
        read, since = -1, time.monotonic()

        def ended() -> bool:
            nonlocal read, since
            if (now := self.received()) != read:
                read, since = now, time.monotonic()
            return read >= self.copies or time.monotonic() - since > quiet

        self.crew.wait(ended, "shadow nodes to read to the end", self.load.seconds)

    def _judge(self, ranks: Sequence[dict[str, Any]]) -> Verdict:
        tagged: dict[StreamKey, Digest] = {}
        read: dict[ReadKey, Digest] = {}
        seconds = 0.0
        for result in ranks:
            seconds = max(seconds, sum(result["seconds"]))
            for s in result["streams"]:
                tagged[s["boundary"], s["channel"], s["shadow_id"]] = Digest(s["bytes"], s["sha256"])
        for member in self.shadows:
            node = self.lab.topology.host(member.name).number
            for s in self.result(member)["streams"]:
                read[s["boundary"], s["channel"], s["shadow_id"], node] = Digest(s["bytes"], s["sha256"])
        rows = compare(self.job, tagged, read) if self.load.tagged else ()
        return Verdict(rows, seconds, orders.gathered(self.job, self.load))


def received_by(sink: Member) -> int:
    """What a sink has said last of the bytes that it has read."""
    whole = sink.said().rpartition("\n")[0]  # up to the last line's end: it may be half written
    said = [line for line in whole.splitlines() if line.startswith("received ")]
    return int(said[-1].split()[1]) if said else 0
