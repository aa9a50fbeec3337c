"""Records of the ranks of a training job, and their evaluation. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

_IN_STARTED: Final = ("process", "torch", "checkmate")
"""Times that a rank's event "started" has: of its process's start, and of the ends of two imports."""

Loss = tuple[int, float]
"""An iteration, and the loss in it."""


@dataclass(frozen=True)
class RankEvent:
    """An event in a rank, on the monotonic clock; see `topologies.training.in_rank`."""

    name: str
    attempt: int
    pid: int
    at: float
    more: Mapping[str, Any]


@dataclass(frozen=True)
class Timed:
    """An iteration of a rank: its begin and end, and its processor time in seconds."""

    began: float
    ended: float
    processor: float


@dataclass(frozen=True)
class TimedBlock:
    """Mean time per iteration in a block: in seconds, and in seconds of processor time of all ranks."""

    seconds: float
    processor: float


@dataclass(frozen=True)
class RecoveryTime:
    """Time from a kill to the end of the next trained iteration; its parts in seconds, in order."""

    rank: int
    iteration: int
    phase: str
    resumed_with: int
    parts: Mapping[str, float]
    in_place: bool = False
    """Whether the other ranks' processes have gone on."""

    @property
    def seconds(self) -> float:
        """The total time."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class JobRecord:
    """The records of each rank, in order."""

    events: Mapping[int, Sequence[RankEvent]]
    completed: Mapping[int, Sequence[Loss]]

    @cached_property
    def losses(self) -> dict[int, dict[int, float]]:
        """The loss by rank and iteration; the last one if an iteration was repeated."""
        return {rank: dict(losses) for rank, losses in self.completed.items()}

    @property
    def curve(self) -> dict[int, float]:
        """The mean loss of the iterations that all ranks have completed."""
        common = set.intersection(*(set(losses) for losses in self.losses.values()))
        ranks = self.losses.values()
        return {
            iteration: statistics.fmean(losses[iteration] for losses in ranks) for iteration in sorted(common)
        }

    @property
    def repeated(self) -> dict[int, int]:
        """Iterations that a rank has completed more than once, with the highest count."""
        counts: Counter[int] = Counter()
        for iterations in self.completed.values():
            counts |= Counter(iteration for iteration, _ in iterations)  # the greater counts
        return {iteration: count for iteration, count in sorted(counts.items()) if count > 1}

    @property
    def changed_when_repeated(self) -> list[tuple[int, int]]:
        """(rank, iteration) of repeated iterations whose loss changed."""
        changes = []
        for rank, iterations in self.completed.items():
            first: dict[int, float] = {}
            for iteration, loss in iterations:
                if first.setdefault(iteration, loss) != loss:
                    changes.append((rank, iteration))
        return changes

    @property
    def digests(self) -> dict[int, str]:
        """Each rank's digest of its final parameters and optimizer state."""
        return {
            rank: str(event.more["digest"])
            for rank, events in self.events.items()
            for event in events
            if event.name == "ended"
        }

    @cached_property
    def timed(self) -> dict[int, list[Timed]]:
        """Timings by iteration, one of each rank; the last ones if an iteration was repeated."""
        timings: dict[int, dict[int, Timed]] = {}
        for rank, events in self.events.items():
            for event in events:
                if event.name == "iteration":
                    timing = Timed(event.more["began"], event.at, event.more["processor"])
                    timings.setdefault(event.more["iteration"], {})[rank] = timing
        return {
            iteration: [ranks[rank] for rank in sorted(ranks)] for iteration, ranks in sorted(timings.items())
        }

    def block(self, first: int, stop: int) -> TimedBlock | None:
        """Return the means over iterations [first, stop); `None` if not all are timed on all ranks."""
        if any(len(self.timed.get(iteration, [])) != len(self.events) for iteration in range(first, stop)):
            return None
        spans = zip(self.timed[first], self.timed[stop - 1], strict=True)
        seconds = statistics.fmean(last.ended - begin.began for begin, last in spans)
        processor = sum(rank.processor for iteration in range(first, stop) for rank in self.timed[iteration])
        return TimedBlock(seconds / (stop - first), processor / (stop - first))

    def recoveries(self) -> list[RecoveryTime]:
        """Return the recovery from each kill in the records."""
        kills = [
            (event.at, rank, int(event.more["iteration"]), str(event.more["phase"]))
            for rank, events in self.events.items()
            for event in events
            if event.name == "killed"
        ]
        recoveries = (self._recovery(*kill) for kill in sorted(kills))
        return [recovery for recovery in recoveries if recovery is not None]

    def _recovery(self, at: float, rank: int, iteration: int, phase: str) -> RecoveryTime | None:
        """Return the recovery, or `None` if another kill came first."""
        marks = {name: self._marks(name, at) for name in ("group_ready", "restored", "protected")}
        ends = [
            next((e.at for e in events if e.name in ("iteration", "ended") and e.at > at), None)
            for events in self.events.values()
        ]
        if not all(marks.values()) or None in ends:
            return None
        ready = max(event.at for event in marks["group_ready"])
        started = [e for events in self.events.values() for e in events if e.name == "started"]
        new = [event for event in started if at < event.at < ready]
        if not new:
            return None
        times = [
            at,
            *(max(float(event.more[name]) for event in new) for name in _IN_STARTED),
            *(max(event.at for event in marks[name]) for name in ("group_ready", "restored", "protected")),
            max(end for end in ends if end is not None),
        ]
        names = (
            "the launcher notices, and starts processes",
            "Python starts, PyTorch is imported",
            "checkmate is imported",
            "the ranks meet, the model is created",
            "checkmate.restore",
            "checkmate.protect",
            "the first iteration",
        )
        parts = {name: end - begin for name, (begin, end) in zip(names, pairwise(times), strict=True)}
        resumed = int(marks["restored"][0].more["iteration"])
        in_place = {event.pid for event in new} != {event.pid for event in marks["group_ready"]}
        return RecoveryTime(rank, iteration, phase, resumed, parts, in_place)

    def _marks(self, name: str, after: float) -> list[RankEvent]:
        """Return each rank's first such event after a time; empty if a rank has none."""
        marks = [
            next((e for e in events if e.name == name and e.at > after), None)
            for events in self.events.values()
        ]
        return [event for event in marks if event] if None not in marks else []


def read_events(lines: Iterable[str]) -> list[RankEvent]:
    """Return the events in a file's lines, without incomplete ones."""
    events = []
    for line in lines:
        if line.endswith("\n"):
            record = json.loads(line)
            name, attempt, pid, at = (record.pop(key) for key in ("event", "attempt", "pid", "at"))
            events.append(RankEvent(name, attempt, pid, at, record))
    return events


def read_losses(lines: Iterable[str]) -> list[Loss]:
    """Return the losses in a file's lines, without incomplete ones."""
    records = (json.loads(line) for line in lines if line.endswith("\n"))
    return [(int(record["iteration"]), float(record["loss"])) for record in records]


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% confidence interval (Student's t)."""

    mean: float
    half: float
    samples: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def interval(samples: Sequence[float]) -> Interval:
    """Return the interval of independent samples; raise `ValueError` if there are fewer than two."""
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} samples have no interval; at least two are needed")
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    return Interval(statistics.fmean(samples), _t975(len(samples) - 1) * error, len(samples))


def _t975(freedom: int) -> float:
    """Return Student's t at 97.5% (Abramowitz and Stegun 26.7.5; below 5 degrees, their table 26.10)."""
    small = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
    if freedom in small:
        return small[freedom]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
