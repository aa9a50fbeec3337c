"""What raw data of cells say: medians with their spread, paired by start. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evaluation.cells import Cell
from benchmarks.evaluation.systems import CHECKMATE, GLOO, RING

Raw = Mapping[Cell, Mapping[str, Any]]
Samples = tuple[float, ...]


@dataclass(frozen=True)
class Throughput:
    """A system at an interval, undisturbed; sizes in bytes.

    `relative` has its iterations per second relative to those without checkpoints, of each start. `ring` is
    the same relative to Checkmate's ring without checkpoints. `written` and `sent` are those of all ranks in
    an iteration; `trainers` is the mean peak of the ranks, `helpers` that of all shadow nodes together.
    """

    workload: str
    system: str
    interval: int
    relative: Samples
    ring: Samples
    seconds: Samples
    written: float
    sent: float
    trainers: float
    helpers: float

    @property
    def checkpoints(self) -> float:
        """The number of checkpoints in 1,000 iterations."""
        return 1000 / self.interval if self.interval else 0.0


@dataclass(frozen=True)
class Failures:
    """A system at an interval, with kills.

    `repeated` has the iterations that were trained again, for each kill, and `useful` those of an hour that
    were not lost; both have a sample for each start. `next_trained` has the seconds from a kill to the end of
    the next iteration, and `regained` those until training was where it had been: a sample for each kill.
    """

    system: str
    interval: int
    repeated: Samples
    next_trained: Samples
    regained: Samples
    useful: Samples


def throughputs(raw: Raw) -> list[Throughput]:
    """Return each system, workload by workload. Systems without their baseline are left out."""
    seconds = {cell: iteration_seconds(data) for cell, data in raw.items() if cell.kind == "throughput"}
    groups: dict[tuple[str, str, int], list[Cell]] = defaultdict(list)
    for cell in seconds:
        groups[cell.workload, cell.system, cell.interval].append(cell)
    found = []
    for (workload, system, interval), cells in groups.items():
        pairs = [(cell, _baseline(cell, GLOO), _baseline(cell, RING)) for cell in sorted(cells)]
        whole = [pair for pair in pairs if pair[1] in seconds and pair[2] in seconds]
        if not whole:
            continue
        resources = [_resources(raw[cell]) for cell, _, _ in whole]
        means = [statistics.fmean(each) for each in zip(*resources, strict=True)]
        chosen = max(_interval(raw[cell]) for cell, _, _ in whole)
        found.append(
            Throughput(
                workload,
                system,
                interval or (chosen if system not in (GLOO, RING) else 0),
                tuple(seconds[base] / seconds[cell] for cell, base, _ in whole),
                tuple(seconds[ring] / seconds[cell] for cell, _, ring in whole),
                tuple(seconds[cell] for cell, _, _ in whole),
                *means,
            )
        )
    return sorted(found, key=lambda one: (one.workload, _rank(one.system), one.system, one.interval))


def failures(raw: Raw, seconds: float) -> list[Failures]:
    """Return each system that was killed, over periods of `seconds`."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for cell, data in sorted(raw.items()):
        if cell.kind == "failures":
            groups[cell.system, cell.interval].append(data)
    found = []
    for (system, interval), starts in groups.items():
        killed = [data for data in starts if data["kills"]]
        times = [each for data in killed for each in recoveries(data)]
        after, regained = zip(*times, strict=True) if times else ((), ())
        useful = tuple(3600 / seconds * _highest(data["ranks"][0], data["ended"]) for data in starts)
        again = tuple(repeated(data) for data in killed)
        found.append(Failures(system, interval, again, after, regained, useful))
    return sorted(found, key=lambda one: (_rank(one.system), one.system, one.interval))


def losses(raw: Raw) -> dict[str, float]:
    """Return, by system, the greatest difference of a loss after restores from that of an undisturbed run."""
    found = {}
    for cell, data in raw.items():
        base = Cell("throughput", cell.workload, GLOO if cell.system != CHECKMATE else RING, 0, 0)
        if cell.kind == "losses" and base in raw:
            pairs = [_losses(log) for log in data["ranks"]], [_losses(log) for log in raw[base]["ranks"]]
            found[cell.system] = max(
                abs(ours[one] - theirs[one]) for ours, theirs in zip(*pairs, strict=True) for one in ours
            )
    return found


def iteration_seconds(data: Mapping[str, Any]) -> float:
    """Return the mean time from one iteration to the next on rank 0."""
    ends = {line["iteration"]: line["at"] for line in _steps(data["ranks"][0])}
    first, last = _timed(data)
    return float((ends[last] - ends[first]) / (last - first))


def recoveries(data: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return, for each kill, seconds to the end of the next trained iteration, and until no work was missing.

    If that did not come before the end, it is the time until the end.
    """
    log = [line for line in data["ranks"][0] if line["at"] <= data["ended"]]
    found = []
    for kill in data["kills"]:
        resumed = _first(line["at"] for line in log if "resumed" in line and line["at"] > kill)
        trained = [line for line in _steps(log) if resumed is not None and line["at"] > resumed]
        missing = _highest(log, kill)
        after = _first(line["at"] for line in trained)
        back = _first(line["at"] for line in trained if line["iteration"] >= missing)
        found.append(((after or data["ended"]) - kill, (back or data["ended"]) - kill))
    return found


def repeated(data: Mapping[str, Any]) -> float:
    """Return how many iterations rank 0 has completed again, for each kill."""
    done = [line["iteration"] for line in _steps(data["ranks"][0]) if line["at"] <= data["ended"]]
    return (len(done) - len(set(done))) / len(data["kills"])


def _steps(log: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines of a log that are iterations."""
    return [line for line in log if "iteration" in line]


def _first(times: Iterable[float]) -> float | None:
    return next(iter(times), None)


def _timed(data: Mapping[str, Any]) -> tuple[int, int]:
    """Return the first and the last iteration between whose ends time is measured."""
    return data["timed_from"], max(line["iteration"] for line in _steps(data["ranks"][0]))


def _highest(log: Sequence[Mapping[str, Any]], until: float) -> int:
    """Return how many iterations were completed at a time, however often."""
    return 1 + max((line["iteration"] for line in _steps(log) if line["at"] <= until), default=-1)


def _interval(data: Mapping[str, Any]) -> int:
    """Return the interval that the system had at the end."""
    return max((int(line["interval"]) for line in data["ranks"][0] if "interval" in line), default=0)


def _resources(data: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Return bytes written and sent in an iteration, and peak memory of a trainer and of all helpers."""
    first, last = _timed(data)
    written = sent = 0.0
    peaks = []
    for log in data["ranks"]:
        by_iteration = {line["iteration"]: line["used"] for line in _steps(log)}
        begin, end = by_iteration[first], by_iteration[last]
        written += (end["written"] - begin["written"]) / (last - first)
        sent += (end["sent"] - begin["sent"]) / (last - first)
        peaks.append(end["peak"])
    return written, sent, statistics.fmean(peaks), float(sum(data["helpers"]))


def _losses(log: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {line["iteration"]: line["loss"] for line in _steps(log)}


def _baseline(cell: Cell, system: str) -> Cell:
    return Cell("throughput", cell.workload, system, 0, cell.start)


def _rank(system: str) -> int:
    """Return the place of a system in tables: Checkmate, those without checkpoints, then all others."""
    first = (CHECKMATE, RING, GLOO)
    return first.index(system) if system in first else len(first)
