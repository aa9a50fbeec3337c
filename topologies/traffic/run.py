"""Traffic in a lab: shadow nodes and rings, and the comparison of both ends.

with Lab(load("single_tor")) as lab, Crew(lab) as crew, serving(crew):
    outcome = Traffic(crew, Load()).run()
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from checkmate.base.wording import JSON_VERSION
from checkmate.job.files import read_job
from topologies.crew import Crew, Member, await_streams
from topologies.crew import status as read_status
from topologies.describe.topology import LabError
from topologies.kernel.processes import PYTHON
from topologies.progress import StepProgress
from topologies.traffic import orders
from topologies.traffic.digests import Tail
from topologies.traffic.orders import Load
from topologies.traffic.port_drops import PortDrops, port_drops
from topologies.traffic.verdict import Digest, StreamKey, StreamsVerdict, compare

_CONNECT_SECONDS: Final = 60.0
_QUIET_SECONDS: Final = 5.0


@dataclass(frozen=True)
class TrafficOutcome:
    """Outcome of a run: the verdict, and the reports of ranks and switches (`checkmate status --json`).

    `port_drops` are frames lost at the switches' ports, which P4 counters do not see.
    """

    verdict: StreamsVerdict
    ranks: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    port_drops: list[PortDrops]

    @property
    def good(self) -> bool:
        """Whether every stream is equal at both ends and the tagger never failed."""
        return self.verdict.equal and not self.faults

    @property
    def faults(self) -> set[str]:
        """The tagger's faults."""
        return {name for rank in self.ranks for name, count in rank["faults"].items() if count}

    @property
    def seconds(self) -> tuple[float, ...]:
        """The time of each iteration on the slowest rank."""
        return tuple(max(times) for times in zip(*(rank["seconds"] for rank in self.ranks), strict=True))

    @property
    def retransmitted(self) -> int:
        """The number of segments that ranks have retransmitted."""
        return sum(rank["retransmitted_segments"] for rank in self.ranks)

    def goodput(self) -> float:
        """Return each rank's goodput in Gbit/s, without the first iteration, in which TCP windows open."""
        nbytes = self.ranks[0]["sent_bytes"] / len(self.seconds)
        return float(8e-9 * nbytes * len(self.seconds[1:]) / sum(self.seconds[1:]))

    def data(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        keys = ("rank", "goodput_bits_per_second", "retransmitted_segments", "verified", "faults")
        ranks = [{key: rank[key] for key in keys} for rank in self.ranks]
        drops = [asdict(drop) for drop in self.port_drops]
        more = {"ranks": ranks, "switches": self.switches, "port_drops": drops}
        return {"version": JSON_VERSION, "good": self.good} | self.verdict.data() | more


class Traffic:
    """One run in a lab with a controller. A `LabError` quotes the process that failed.

    `run` is `connect`, `gather` and `finish`; tests call these one by one.
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
        """The number of bytes that the shadow nodes should read."""

    def run(self, tick: Callable[[int], None] = lambda _: None) -> TrafficOutcome:
        """Start shadow nodes and rings, and compare; call `tick` with the number of bytes read so far."""
        self.connect()
        self.gather(tick)
        return self.finish()

    def connect(self) -> None:
        """Start the shadow nodes, and wait until all streams are connected."""
        if not self.load.tagged:
            return
        self._steps("shadow nodes connect their streams")
        sinks = orders.sinks(self.job, self.lab.topology, self.load)
        self.shadows = [self._start_sink(host, sink) for host, sink in sinks.items()]
        self.await_ready(self.shadows)
        await_streams(self.crew)

    def gather(self, tick: Callable[[int], None] = lambda _: None) -> None:
        """Run the rings to their end."""
        self._steps(f"rings gather {self.load.nbytes / 1e6:,.0f} MB of tensors")
        for index, group in enumerate(self.job.dp_groups):
            ring = orders.ring(self.job, index, self.load)
            for place, rank in enumerate(group.ranks):
                at = self.lab.topology.ranks[rank.rank]
                self.ranks.append(
                    self.start_process(at.name, at.host.name, "rank", ring, "--rank", str(place))
                )

        def look() -> None:
            nbytes = self.received()
            self._steps.moved(nbytes, self.copies)
            tick(nbytes)

        self.crew.finish(self.ranks, self.load.seconds, look if self.shadows else lambda: None)

    def join(self, member: Member, place: Tail) -> Member:
        """Replace a shadow node that has ended by one that joins its streams at a position ahead.

        The verdict on these streams is then not equal; their tails are in the ranks' results.
        """
        sink = orders.sinks(self.job, self.lab.topology, self.load, place)[member.name]
        self.copies -= sum(stream["base"] for stream in sink["streams"])
        joined = self._start_sink(member.name, sink)
        self.shadows[self.shadows.index(member)] = joined
        self.await_ready([joined])
        return joined

    def finish(self, quiet: float = _QUIET_SECONDS) -> TrafficOutcome:
        """Wait until the shadow nodes have read everything, stop them, and return the outcome.

        It stops waiting for missing copies `quiet` seconds after the last copy.
        """
        status: list[dict[str, Any]] = []
        end = time.time()
        if self.shadows:
            self._steps("shadow nodes read to the end")
            self._await_end(quiet)
            end = time.time()
            status = read_status(self.crew)  # counters are removed with the streams
        for member in self.shadows:
            self.crew.stop(member)
        ranks = [self.result(member) for member in self.ranks]
        return TrafficOutcome(self._judge(ranks), ranks, status, port_drops(self.lab, since=end))

    def _start_sink(self, host: str, config: dict[str, Any]) -> Member:
        return self.start_process(host, host, "sink", config, "--job", str(self.lab.job_file))

    def start_process(self, name: str, host: str, module: str, config: dict[str, Any], *more: str) -> Member:
        """Start a rank or a sink on a host, with its configuration and a file for its result."""
        file = self.lab.directory / f"{name}.config.json"
        file.write_text(json.dumps(config))
        self._result_file(name).unlink(missing_ok=True)
        argv = [*PYTHON, "-m", f"topologies.traffic.{module}", "--config", str(file)]
        return self.crew.start(name, host, [*argv, "--result", str(self._result_file(name)), *more])

    def await_ready(self, shadows: Sequence[Member]) -> None:
        """Wait until these sinks report that their streams are connected."""
        self.crew.wait(
            lambda: all("ready" in member.output_text() for member in shadows),
            "shadow nodes to connect their streams",
            _CONNECT_SECONDS,
        )

    def result(self, member: Member) -> dict[str, Any]:
        """Return the result of a rank or a sink that has ended."""
        try:
            result: dict[str, Any] = json.loads(self._result_file(member.name).read_text())
        except FileNotFoundError:
            raise LabError(f"{member.name} ended without a result: {member.last_words()}") from None
        return result

    def received(self) -> int:
        """Return the number of bytes that the shadow nodes have read so far."""
        return sum(map(received_by, self.shadows))

    def _result_file(self, host: str) -> Path:
        return self.lab.directory / f"{host}.result.json"

    def _await_end(self, quiet: float) -> None:
        """Wait until all copies are read, or none arrives; the switch has received everything by now."""
        read, since = -1, time.monotonic()

        def are_read() -> bool:
            nonlocal read, since
            if (now := self.received()) != read:
                read, since = now, time.monotonic()
            return read >= self.copies or time.monotonic() - since > quiet

        self.crew.wait(are_read, "shadow nodes to read to the end", self.load.seconds)

    def _judge(self, ranks: Sequence[dict[str, Any]]) -> StreamsVerdict:
        tagged = dict(pair for rank in ranks for pair in _digests(rank))
        read = {
            (*key, self.lab.topology.host(member.name).number): digest
            for member in self.shadows
            for key, digest in _digests(self.result(member))
        }
        rows = compare(self.job, tagged, read) if self.load.tagged else ()
        seconds = max(sum(rank["seconds"]) for rank in ranks)
        return StreamsVerdict(rows, seconds, orders.gathered(self.job, self.load))


def _digests(result: dict[str, Any]) -> Iterator[tuple[StreamKey, Digest]]:
    """Yield each stream in the result of a rank or a sink, with its digest."""
    for stream in result["streams"]:
        key = (stream["boundary"], stream["channel"], stream["shadow_id"])
        yield key, Digest(stream["bytes"], stream["sha256"])


def received_by(sink: Member) -> int:
    """Return the number of bytes in a sink's last report."""
    whole = sink.output_text().rpartition("\n")[0]  # complete lines only: the last may be incomplete
    reports = [line for line in whole.splitlines() if line.startswith("received ")]
    return int(reports[-1].split()[1]) if reports else 0
