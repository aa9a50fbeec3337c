"""Kill ranks of an evaluated job: at random times, or after every second iteration."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.evaluation.cells import Cell, MeasuredExtent
from benchmarks.evaluation.record import Log, has_regained, log_of, parse_line, steps_of
from topologies.describe.topology import LabError
from topologies.torchrun import keeps_processes
from topologies.training.job import TrainingJob
from topologies.training.job_processes import rank_process

LOSSES: Final = 8
"""Iterations of a job that is killed after every second one."""
SECONDS: Final = 1800.0
"""Time for a job to end."""
_REGAINED_SECONDS: Final = 240.0
_TAIL_BYTES: Final = 4096
_START_EVENT: Final = '"event": "started"'
_ITERATION: Final = '"iteration":'

Progress = Callable[[str], None]


def fail_at_random(job: TrainingJob, cell: Cell, extent: MeasuredExtent, progress: Progress) -> list[float]:
    """Kill ranks at random for some time; return when. All systems have the same times between kills.

    A rank that is being started again is killed as soon as it has a process.
    """
    generator = random.Random(f"{cell.start} kills")
    end = time.monotonic() + extent.seconds
    kills: list[float] = []
    next_kill = time.monotonic() + generator.expovariate(1 / extent.mtbf)
    rank = generator.randrange(len(job.ranks))
    while time.monotonic() < end:
        _check(job, kills)
        progress(f"iteration {reached_iteration(job)}, {len(kills)} kills")
        if time.monotonic() >= next_kill and _kill(job, rank):
            kills.append(time.monotonic())
            next_kill += generator.expovariate(1 / extent.mtbf)
            rank = generator.randrange(len(job.ranks))
        time.sleep(min(0.2, max(next_kill - time.monotonic(), 0.02)))
    return kills


def fail_every_second_iteration(job: TrainingJob, progress: Progress) -> list[float]:
    """Kill a rank after every second iteration until the job ends; return when."""
    kills: list[float] = []
    next_iteration = 2
    deadline = time.monotonic() + SECONDS
    while any(member.running for member in job.ranks.values()):
        _check(job, kills)
        if time.monotonic() > deadline:
            raise LabError(f"the job has not ended within {SECONDS:g} s")
        progress(f"iteration {reached_iteration(job)}, {len(kills)} kills")
        if (
            next_iteration < LOSSES
            and reached_iteration(job) >= next_iteration
            and _kill(job, len(kills) % len(job.ranks))
        ):
            kills.append(time.monotonic())
            next_iteration += 2
        time.sleep(0.02)
    job.finish(1.0)
    return kills


def _kill(job: TrainingJob, rank: int) -> bool:
    """Kill a rank's process with SIGKILL, if there is one; what starts it again goes on, as does a spare."""
    launcher = list(job.ranks.values())[rank]  # each host has one rank
    if not keeps_processes(job.plan.starter):
        return bool(job.crew.kill_children(launcher))
    process = rank_process(launcher)
    if process is None or process not in launcher.children():
        return False
    os.kill(process, signal.SIGKILL)
    return True


def _check(job: TrainingJob, kills: list[float]) -> None:
    """Raise `LabError` if ranks end by themselves, which torchrun would hide by starting them again."""
    starts = max(file.read_text().count(_START_EVENT) for file in job.folder.glob("rank*.events.jsonl"))
    if starts > 2 * (len(kills) + 1) + 1:
        with job.explained():
            raise LabError(f"ranks were started {starts} times for {len(kills)} kills")


def reached_iteration(job: TrainingJob) -> int:
    """Return how many iterations all ranks have completed, those again after a kill counted from there.

    It is asked often while training is timed, so it reads the end of each log.
    """
    files = _files(job.folder)
    if len(files) < len(job.crew.lab.topology.ranks):
        return 0
    return 1 + min(_newest(file) for file in files)


def _newest(file: Path) -> int:
    """Return the last iteration in a rank's log, or -1."""
    with file.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = log.read().decode().splitlines()
    parsed_lines = (parse_line(line) for line in reversed(lines) if _ITERATION in line)
    return next((int(line["iteration"]) for line in parsed_lines if line is not None), -1)


def logs_in(folder: Path) -> list[Log]:
    return [log_of(file.read_text()) for file in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("steps*.jsonl"))


def await_regained(job: TrainingJob, kills: list[float], *, alone: bool) -> None:
    """Wait until training is where it was before each kill, so that every kill has its whole cost."""
    deadline = time.monotonic() + _REGAINED_SECONDS
    while not has_regained(kills, steps_of(logs_in(job.folder), 0.0, alone=alone)):
        _check(job, kills)
        if time.monotonic() > deadline:
            with job.explained():
                raise LabError(f"training has not come back within {_REGAINED_SECONDS:g} s after the kills")
        time.sleep(0.5)
