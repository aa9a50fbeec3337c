"""The evaluation's cells: what each one measures, and in which order. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.evaluation.systems import (
    CHECKMATE,
    COMPARATORS,
    GLOO,
    LIVE,
    OWN_FREQUENCY,
    RING,
    STARTERS,
)

Kind = Literal["throughput", "failures", "losses"]
INTERVALS: Final = (1, 5, 20)


@dataclass(frozen=True, order=True)
class Cell:
    """One measurement in a lab of its own. A cell of another `start` is the same, measured again.

    `interval` is the number of iterations from one checkpoint to the next, and 0 if the system chooses it.
    """

    kind: Kind
    workload: str
    system: str
    interval: int
    start: int

    @property
    def round(self) -> tuple[Kind, int]:
        """The cells that are measured one after another, under the same conditions.

        Losses are compared with those of the first start's throughput.
        """
        return ("throughput", 0) if self.kind == "losses" else (self.kind, self.start)

    @property
    def key(self) -> str:
        """The cell's file name."""
        words = [self.kind, self.workload, self.system, str(self.interval), str(self.start)]
        return "-".join(word.replace(" ", "_").replace(",", "").replace(".", "_") for word in words)


@dataclass(frozen=True)
class MeasuredExtent:
    """How much is measured: with failures, `seconds`, every `mtbf` s on average.

    `starts` are those of the first workload, `other_starts` those of the others. `own_frequency`: a cell in
    which CheckFreq chooses its interval, which takes over 2 minutes. `losses`: the systems whose losses
    after restores are compared, a minute each. `failing`: the systems whose ranks are killed.
    """

    name: str
    starts: int
    intervals: Sequence[int]
    workloads: Sequence[str]
    seconds: float
    mtbf: float
    other_starts: int = 1
    failing_starts: int = 1
    own_frequency: bool = True
    losses: Sequence[str] = (CHECKMATE, *COMPARATORS)
    failing: Sequence[str] = (GLOO, LIVE, CHECKMATE, *COMPARATORS)


# The least and the greatest of six are a 97% interval of the median.
WHOLE: Final = MeasuredExtent("whole", 6, INTERVALS, ("gpt", "batchnorm", "embeddings"), 120.0, 40.0, 3, 2)
QUICK: Final = MeasuredExtent(
    "quick", 1, (1,), ("gpt",), 45.0, 20.0, own_frequency=False, losses=(CHECKMATE, *COMPARATORS[:3])
)
RECOVERY: Final = MeasuredExtent(
    "recovery",
    0,
    (1,),
    ("gpt",),
    120.0,
    40.0,
    failing_starts=2,
    losses=(),
    failing=(CHECKMATE, *STARTERS, LIVE, "torch.save"),
)
"""Systems that keep processes, beside the best of those that restart all; each is killed."""


def matrix(extent: MeasuredExtent) -> list[Cell]:
    """Return all cells in the order in which they are measured.

    Each start has every system once, in a random order, so that a machine that drifts is fair to all.
    """
    cells: list[Cell] = []
    for start in range(extent.starts):
        cells += _shuffle(_throughput(extent, start), start)
    for start in range(extent.failing_starts):
        cells += _shuffle(_failures(extent, start), start)
    return cells + [Cell("losses", "gpt", system, 1, 0) for system in extent.losses]


def _throughput(extent: MeasuredExtent, start: int) -> Iterator[Cell]:
    workloads = extent.workloads if start < extent.other_starts else extent.workloads[:1]
    for workload in workloads:
        for system in (GLOO, RING, LIVE):
            yield Cell("throughput", workload, system, 0, start)
        yield Cell("throughput", workload, CHECKMATE, 1, start)
        for system in COMPARATORS:
            for interval in extent.intervals if workload == "gpt" else extent.intervals[:1]:
                yield Cell("throughput", workload, system, interval, start)
        if extent.own_frequency and OWN_FREQUENCY in COMPARATORS and workload == "gpt":
            yield Cell("throughput", workload, OWN_FREQUENCY, 0, start)


def _failures(extent: MeasuredExtent, start: int) -> Iterator[Cell]:
    for system in extent.failing:
        intervals = (0,) if system in (GLOO, LIVE) else extent.intervals if system in COMPARATORS else (1,)
        for interval in intervals:
            yield Cell("failures", "gpt", system, interval, start)


def _shuffle(cells: Iterator[Cell], start: int) -> list[Cell]:
    shuffled = list(cells)
    random.Random(start).shuffle(shuffled)
    return shuffled
