"""Two training jobs, each in a lab of its own, that take turns: one goes on while the other waits.

So both meet the same machine, and their iteration times can be compared pair by pair.
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
    """CPUs for the trainers, and for all else: switches, controller, shadow nodes. `None`: wherever."""

    trainers: Collection[int] | None = None
    others: Collection[int] | None = None


def cores() -> Cores:
    """One for the trainers and another for all else, where the machine lets us use two."""
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
    """A lab with its controller, and its shadow nodes where the plan needs them; training is not started."""
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
    """Train `block` iterations at a time; who begins changes. `tick` gets how many both have done."""
    for number, done in enumerate(range(0, iterations, block)):
        until = min(done + block, iterations)
        for training in trainings if number % 2 == 0 else trainings[::-1]:
            training.let(until)
            training.await_iterations(until, _TURN_SECONDS)
        tick(until)
