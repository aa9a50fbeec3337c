"""Measure one cell: a job in a lab of its own, undisturbed or with kills at random times."""

from __future__ import annotations

import datetime
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.comparators import packages
from benchmarks.comparators.frequency import PROFILED
from benchmarks.evaluation.cells import Cell, Extent
from benchmarks.evaluation.record import (
    Record,
    blocks_of,
    interval_of,
    log_of,
    losses_of,
    peaks_of,
    plain_of,
    since,
    steps_of,
)
from benchmarks.evaluation.systems import LIVE, OWN_FREQUENCY, reduce_of
from benchmarks.report import commit, machine
from testbed.process_memory import peak_resident
from topologies.describe.topology import CONTROLLER, MGMT_NET, LabError, load
from topologies.training.job import JobPlan, TrainingJob, start_all, training_lab

WARM_UP: Final = 5
"""Iterations that are not timed: DDP rebuilds its buckets, and TCP windows open."""
_LOSSES: Final = 8
_ENDLESS: Final = 1_000_000
_SECONDS: Final = 1800.0
_TOPOLOGY: Final = "single_tor"
_LIGHTHOUSE_PORT: Final = 29510
_LIGHTHOUSE: Final = (
    *(sys.executable, packages.FOLDER / "bin" / "torchft_lighthouse"),
    *("--bind", f"[::]:{_LIGHTHOUSE_PORT}", "--min_replicas", "1"),
)
_STARTED: Final = '"event": "started"'
_ITERATION: Final = '"iteration":'

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Folders:
    """Where a cell's job writes: checkpoints to `disk`, and to a tmpfs, its own records to `out`."""

    disk: Path
    memory: Path
    out: Path


def measure(cell: Cell, extent: Extent, scratch: Path, progress: Progress) -> Record:
    """Return a cell's raw data. `scratch` is on the file system to which checkpoints go.

    Raises:
        LabError: The job fails, although nobody has killed it.
    """
    measured = commit()
    with (
        tempfile.TemporaryDirectory(prefix="checkmate-evaluation-", dir=scratch) as disk,
        tempfile.TemporaryDirectory(prefix="checkmate-evaluation-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="checkmate-evaluation-") as out,
    ):
        folders = Folders(Path(disk), Path(memory), Path(out))
        plan = _plan(cell, folders)
        with training_lab(load(_TOPOLOGY), "softswitch", "evaluation", plan, folders.out) as job:
            if cell.system == LIVE:
                others = {max(os.sched_getaffinity(0))}
                found = {"PYTHONPATH": str(packages.FOLDER)}
                job.crew.start("lighthouse", CONTROLLER, _LIGHTHOUSE, cpus=others, environment=found)
            start_all([job])
            began = time.monotonic()
            kills = _run(job, cell, extent, progress)
            ended = time.monotonic()
            helpers = tuple(peak_resident(member.process.pid) for member in job.shadows.values())
        logs = [log_of(file.read_text()) for file in _files(folders.out)]
    timed, failing = cell.kind == "throughput", cell.kind == "failures"
    return Record(
        commit=measured,
        day=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine(),
        steps=() if timed else steps_of(logs, began, alone=cell.system == LIVE),
        interval=interval_of(logs),
        kills=since(kills, began),
        ended=round(ended - began, 4),
        losses=() if failing else losses_of(logs, _LOSSES),
        system=blocks_of(logs) if timed else (),
        plain=plain_of(logs) if timed else 0.0,
        peaks=peaks_of(logs) if timed else (),
        helpers=helpers,
    )


def _run(job: TrainingJob, cell: Cell, extent: Extent, progress: Progress) -> list[float]:
    """Let a job train to its end, or as long as is measured. Return when ranks were killed."""
    if cell.kind == "failures":
        return _fail_at_random(job, cell, extent, progress)
    if cell.kind == "losses":
        return _fail_every_second_iteration(job, progress)
    job.finish(_SECONDS, lambda: progress(f"iteration {_reached(job)}"))
    return []


def _plan(cell: Cell, folders: Folders) -> JobPlan:
    arguments = {
        "workload": cell.workload,
        "system": cell.system,
        "interval": cell.interval,
        "iterations": _LOSSES if cell.kind == "losses" else _ENDLESS,
        "disk": folders.disk,
        "memory": folders.memory,
        "lighthouse": f"http://{MGMT_NET[1]}:{_LIGHTHOUSE_PORT}",
    }
    live = cell.system == LIVE
    return JobPlan(
        (*(word for name, value in arguments.items() for word in (f"--{name}", str(value))), *_timed(cell)),
        module="benchmarks.evaluation.live_rank" if live else "benchmarks.evaluation.rank",
        reduce=reduce_of(cell.system),
        restarts=0 if cell.kind == "throughput" else 1000,
        # All use the same links: gloo gets the training network, not mgmt.
        environment={"GLOO_SOCKET_IFNAME": "data0"},
        alone=live,
    )


def _timed(cell: Cell) -> tuple[str, ...]:
    """Return the options for throughput. Every other start has the opposite order of blocks."""
    if cell.kind != "throughput":
        return ()
    profiling = cell.system == OWN_FREQUENCY and not cell.interval
    warm_up = PROFILED.stop if profiling else WARM_UP
    # A system that adapts must not see the other block as a long iteration.
    plain_first = cell.start % 2 and not profiling
    return ("--timed", "--warm-up", str(warm_up), *(["--plain-first"] if plain_first else []))


def _fail_at_random(job: TrainingJob, cell: Cell, extent: Extent, progress: Progress) -> list[float]:
    """Kill ranks at random for some time; return when. All systems have the same times between kills.

    A rank that is being started again is killed as soon as it has a process.
    """
    drawn = random.Random(f"{cell.start} kills")
    end = time.monotonic() + extent.seconds
    kills: list[float] = []
    due = time.monotonic() + drawn.expovariate(1 / extent.mtbf)
    rank = drawn.randrange(len(job.ranks))
    while time.monotonic() < end:
        _check(job, kills)
        progress(f"iteration {_reached(job)}, {len(kills)} kills")
        if time.monotonic() >= due and _kill(job, rank):
            kills.append(time.monotonic())
            due += drawn.expovariate(1 / extent.mtbf)
            rank = drawn.randrange(len(job.ranks))
        time.sleep(min(0.2, max(due - time.monotonic(), 0.02)))
    return kills


def _fail_every_second_iteration(job: TrainingJob, progress: Progress) -> list[float]:
    """Kill a rank after every second iteration until the job ends; return when."""
    kills: list[float] = []
    due = 2
    deadline = time.monotonic() + _SECONDS
    while any(member.running for member in job.ranks.values()):
        _check(job, kills)
        if time.monotonic() > deadline:
            raise LabError(f"the job has not ended within {_SECONDS:g} s")
        progress(f"iteration {_reached(job)}, {len(kills)} kills")
        if due < _LOSSES and _reached(job) >= due and _kill(job, len(kills) % len(job.ranks)):
            kills.append(time.monotonic())
            due += 2
        time.sleep(0.02)
    job.finish(1.0)
    return kills


def _kill(job: TrainingJob, rank: int) -> bool:
    """Kill a rank's process with SIGKILL, if there is one; its torchrun goes on."""
    return bool(job.crew.kill_children(job.ranks[f"rank{rank}"]))


def _check(job: TrainingJob, kills: list[float]) -> None:
    """Raise `LabError` if ranks end by themselves, which torchrun would hide by starting them again."""
    starts = max(file.read_text().count(_STARTED) for file in job.folder.glob("rank*.events.jsonl"))
    if starts > 2 * (len(kills) + 1) + 1:
        with job.explained():
            raise LabError(f"ranks were started {starts} times for {len(kills)} kills")


def _reached(job: TrainingJob) -> int:
    """Return how many iterations all ranks have completed, those again after a kill counted from there.

    It is asked often while training is timed, so it reads one line of each log.
    """
    logs = [file.read_text().splitlines() for file in _files(job.folder)]
    if len(logs) < len(job.crew.lab.topology.ranks):
        return 0
    newest = (next((line for line in reversed(log) if _ITERATION in line), None) for log in logs)
    return 1 + min(-1 if line is None else int(json.loads(line)["iteration"]) for line in newest)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("steps*.jsonl"))


def clear(scratch: Path) -> None:
    """Remove what a killed measurement has left."""
    for place in (scratch, Path("/dev/shm"), Path(tempfile.gettempdir())):
        for left in place.glob("checkmate-evaluation-*"):
            shutil.rmtree(left)
