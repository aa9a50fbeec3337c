"""Summaries of the records of cells: samples of each system. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.evaluation.cells import Cell
from benchmarks.evaluation.record import Record, TrainedStep, missing_after
from benchmarks.evaluation.systems import CHECKMATE, GLOO, LIVE, RING, STARTERS, reduce_of

Records = Mapping[Cell, Record]
Samples = tuple[float, ...]


@dataclass(frozen=True)
class Throughput:
    """A system at an interval, undisturbed; sizes in bytes. `has_own_interval`: it has chosen the interval.

    `relative` has its iterations per second relative to those without it in the same job, of each start.
    `written_bytes` and `sent_bytes` are of all ranks in an iteration; `trainers` is the mean peak of the
    ranks, `helpers` that of all shadow nodes together.
    """

    workload: str
    system: str
    interval: int
    has_own_interval: bool
    relative: Samples
    seconds: Samples
    written_bytes: float
    sent_bytes: float
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
    An iteration without some ranks counts as the share of those that were there.
    """

    system: str
    interval: int
    kills: int
    repeated: Samples
    next_trained: Samples
    regained: Samples
    useful: Samples


def comparable(records: Records, planned: Iterable[Cell]) -> Records:
    """Return the cells of starts that have all systems, because starts differ more than systems do.

    If no start of a model is whole, all of them are kept. Systems without any cell are not missed.
    """
    systems = {cell.system for cell in records}
    cells = [cell for cell in planned if cell.system in systems]
    missing = {(cell.kind, cell.workload, cell.start) for cell in cells if cell not in records}
    whole = {
        (cell.kind, cell.workload) for cell in cells if (cell.kind, cell.workload, cell.start) not in missing
    }
    return {
        cell: record
        for cell, record in records.items()
        if (cell.kind, cell.workload, cell.start) not in missing or (cell.kind, cell.workload) not in whole
    }


def throughputs(records: Records) -> list[Throughput]:
    """Return each system, workload by workload."""
    groups: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for cell, record in sorted(records.items()):
        if cell.kind == "throughput":
            groups[cell.workload, cell.system, cell.interval].append(record)
    results = []
    for (workload, system, interval), starts in groups.items():
        own_interval = not interval and system not in (GLOO, RING, LIVE)
        seconds = tuple(record.system[0].seconds for record in starts)
        results.append(
            Throughput(
                workload,
                system,
                round(statistics.median(record.interval for record in starts)) if own_interval else interval,
                own_interval,
                tuple(record.plain / took for record, took in zip(starts, seconds, strict=True)),
                seconds,
                statistics.fmean(sum(block.written for block in record.system) for record in starts),
                statistics.fmean(sum(block.sent for block in record.system) for record in starts),
                statistics.fmean(statistics.fmean(record.peaks) for record in starts),
                statistics.fmean(sum(record.helpers) for record in starts),
            )
        )
    return sorted(
        results, key=lambda result: (result.workload, _rank(result.system), result.system, result.interval)
    )


def failures(records: Records, seconds: float) -> list[Failures]:
    """Return each system that was killed, over periods of `seconds`."""
    groups: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for cell, record in sorted(records.items()):
        if cell.kind == "failures":
            groups[cell.system, cell.interval].append(record)
    results = []
    for (system, interval), starts in groups.items():
        killed = [record for record in starts if record.kills]
        times = [recovery for record in killed for recovery in recoveries(record)]
        after, regained = zip(*times, strict=True) if times else ((), ())
        hourly = tuple(3600 / seconds * useful(record) for record in starts)
        again = tuple(repeated_iterations(record) for record in killed)
        kills = sum(len(record.kills) for record in starts)
        results.append(Failures(system, interval, kills, again, after, regained, hourly))
    return sorted(results, key=lambda result: (_rank(result.system), result.system, result.interval))


def losses(records: Records) -> dict[str, float]:
    """Return, by system, the greatest difference of a loss after restores from that of an undisturbed run."""
    differences = {}
    for cell, record in records.items():
        base = Cell("throughput", cell.workload, GLOO if reduce_of(cell.system) == "gloo" else RING, 0, 0)
        if cell.kind == "losses" and base in records:
            pairs = zip(record.losses, records[base].losses, strict=True)
            differences[cell.system] = max(
                abs(loss - base_loss) for rank in pairs for loss, base_loss in zip(*rank, strict=True)
            )
    return differences


def recoveries(record: Record) -> list[tuple[float, float]]:
    """Return, for each kill, seconds to the end of the next trained iteration, and until no work was missing.

    The next trained iteration is one that began after the kill.
    """
    times = []
    for kill in record.kills:
        missing = missing_after(kill, record.steps)
        trained = [step for step in record.steps if step.began > kill]
        back = next(step.ended for step in trained if step.iteration >= missing)
        times.append((trained[0].ended - kill, back - kill))
    return times


def repeated_iterations(record: Record) -> float:
    """Return how many iterations were completed again, for each kill."""
    iterations = [step.iteration for step in record.steps]
    return (len(iterations) - len(set(iterations))) / len(record.kills)


def useful(record: Record) -> float:
    """Return the number of iterations that were completed in the period and not lost, with shares of ranks.

    An iteration is lost once it or an earlier one is trained again, also after the period.
    """
    steps: list[TrainedStep] = []
    for step in record.steps:
        while steps and steps[-1].iteration >= step.iteration:
            steps.pop()
        steps.append(step)
    return sum(step.share for step in steps if step.ended <= record.ended)


def _rank(system: str) -> int:
    """Return the place of a system in tables: Checkmate, those without checkpoints, then all others."""
    first = (CHECKMATE, *STARTERS, RING, GLOO)
    return first.index(system) if system in first else len(first)
