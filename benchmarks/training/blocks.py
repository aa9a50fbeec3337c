"""Blocks of iterations of a gated job, each in a mode of its own."""

from __future__ import annotations

from typing import Final

from topologies.training.job import TrainingJob
from topologies.training.record import TimedBlock

WARM_UP: Final = 20
"""Iterations before the first block: DDP rebuilds its buckets, and TCP windows open."""
_SECONDS: Final = 300.0


def block(job: TrainingJob, iterations: int, mode: str = "") -> TimedBlock:
    """Train a block; return the mean of its iterations without the first, which waits for its turn."""
    first = job.next_iteration()
    job.let(first + iterations, mode)
    job.await_iterations(first + iterations, _SECONDS)
    timed: list[TimedBlock] = []

    def is_recorded() -> bool:
        measured = job.record().block(first + 1, first + iterations)
        timed[:] = [] if measured is None else [measured]
        return measured is not None

    job.crew.wait(is_recorded, "the ranks' records", _SECONDS)
    return timed[0]
