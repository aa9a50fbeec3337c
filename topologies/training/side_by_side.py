"""Two training jobs in two labs that take turns: one trains while the other waits.

So both have the same conditions, and their iteration times are comparable pair by pair.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from topologies.controller import serving
from topologies.crew import Crew
from topologies.describe.job_files import Target
from topologies.describe.topology import LabError, Topology
from topologies.lab import Lab
from topologies.training.job import JobPlan, TrainingJob

_START_SECONDS: Final = 180.0
_TURN_SECONDS: Final = 180.0


@dataclass(frozen=True)
class Cores:
    """CPUs for the trainers, and for switches, controller and shadow nodes. `None` means all."""

    trainers: Collection[int] | None = None
    others: Collection[int] | None = None


def cores() -> Cores:
    """Return one CPU for the trainers and another for all else, if this machine has two for us."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores({usable[0]}, {usable[1]}) if len(usable) > 1 else Cores()


@contextlib.contextmanager
def training_lab(
    topology: Topology,
    target: Target,
    name: str,
    plan: JobPlan,
    folder: Path,
    on: Cores,
    progress: Callable[[str], None],
) -> Iterator[TrainingJob]:
    """Yield a job in a new lab, with controller and, if needed, shadow nodes; training is not started."""
    lab = Lab(topology, target, name=name, switch_cpus=on.others, progress=progress)
    with lab, Crew(lab) as crew, serving(crew, cpus=on.others):
        training = TrainingJob(crew, plan, folder, cpus=on.trainers, shadow_cpus=on.others)
        try:
            if plan.reduce == "checkmate":
                progress("shadow nodes")
                training.start_shadow_nodes()
            yield training
        except LabError:
            training.keep_logs()
            raise
        training.stop()


def start(trainings: Collection[TrainingJob]) -> None:
    """Start both, and wait until each rank is ready to begin."""
    for training in trainings:
        training.start()
    for training in trainings:
        training.await_ready(_START_SECONDS)


def turns(
    trainings: tuple[TrainingJob, TrainingJob], iterations: int, block: int, tick: Callable[[int], None]
) -> None:
    """Train `block` iterations at a time in turn, alternating which job begins.

    `tick` is called with the number of iterations that both have completed.
    """
    for number, done in enumerate(range(0, iterations, block)):
        until = min(done + block, iterations)
        for training in trainings if number % 2 == 0 else trainings[::-1]:
            training.let(until)
            training.await_iterations(until, _TURN_SECONDS)
        tick(until)
