"""Many recoveries in place in one process: what it keeps of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped
from benchmarks.training.in_place import RANKS, SPARE, killed_training
from testbed.process_memory import resident

TITLE: Final = "Recoveries in place: what a survivor keeps of each, a GPT of 5 million parameters on 4 ranks"
RECOVERIES: Final = 200
_EVERY: Final = 10
"""Recoveries between two looks at the survivor."""
_SETTLED: Final = 20
"""Recoveries before the first look: caches fill, and the allocator finds its sizes."""
_APART: Final = 1


class ProcessCounts(NamedTuple):
    """Resident megabytes, threads and descriptors of a process."""

    megabytes: float
    threads: int
    descriptors: int

    @classmethod
    def of(cls, process: int) -> ProcessCounts:
        folder = Path(f"/proc/{process}")
        return cls(resident(process) / 1e6, len(os.listdir(folder / "task")), len(os.listdir(folder / "fd")))


def measure() -> list[Result]:
    """Return every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("recoveries in place", "needs root, for network namespaces")]
    looks: list[ProcessCounts] = []
    seconds: list[float] = []
    with Progress(transient=True) as bar, killed_training(SPARE, RECOVERIES) as training:
        task = bar.add_task("recoveries", total=RECOVERIES)
        survivor = training.process(0)
        for number in range(RECOVERIES):
            if number >= _SETTLED and number % _EVERY == 0:
                looks.append(ProcessCounts.of(survivor))
            seconds.append(sum(training.kill(1 + number % (RANKS - 1), _APART).values()))
            bar.update(task, advance=1)
        looks.append(ProcessCounts.of(survivor))
        if training.process(0) != survivor:
            raise RuntimeError("rank 0 has another process than at first")
    megabytes, threads, descriptors = (tuple(map(float, values)) for values in zip(*looks, strict=True))
    recoveries = RECOVERIES - _SETTLED
    growth = (sum(megabytes[-3:]) - sum(megabytes[:3])) / 3 / recoveries
    half = len(seconds) // 2
    return [
        Figure("resident memory of rank 0, added by a recovery", (growth,), "MB", 0.05, 0.2, smaller=True),
        Figure("resident memory of rank 0", megabytes, "MB"),
        Figure("threads of rank 0", threads, ""),
        Figure("descriptors of rank 0", descriptors, ""),
        Figure("a recovery, the first half", tuple(seconds[:half]), "s"),
        Figure("a recovery, the second half", tuple(seconds[half:]), "s"),
    ]
