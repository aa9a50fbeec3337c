"""Two training jobs in two labs that take turns: one trains while the other waits.

So both have the same conditions, and their iteration times are comparable pair by pair.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
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


@contextlib.contextmanager
def training_lab(
    topology: Topology,
    target: Target,
    name: str,
    plan: JobPlan,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[TrainingJob]:
    """Yield a job in a new lab, with controller and, if needed, shadow nodes; training is not started.

    Trainers share one CPU, and all else shares another, if this machine has two for us.
    """
    usable = sorted(os.sched_getaffinity(0))
    trainers, others = ({usable[0]}, {usable[1]}) if len(usable) > 1 else (None, None)
    lab = Lab(topology, target, name=name, switch_cpus=others, progress=progress)
    with lab, Crew(lab) as crew, serving(crew, cpus=others):
        training = TrainingJob(crew, plan, folder, cpus=trainers, shadow_cpus=others)
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
