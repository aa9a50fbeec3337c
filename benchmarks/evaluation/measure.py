"""Measure one cell: a job in a lab of its own, undisturbed or with kills at random times."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.comparators import packages
from benchmarks.comparators.checkfreq import PROFILED
from benchmarks.evaluation.cells import Cell, MeasuredExtent
from benchmarks.evaluation.kills import (
    LOSSES,
    SECONDS,
    Progress,
    await_regained,
    fail_at_random,
    fail_every_second_iteration,
    logs_in,
    reached_iteration,
)
from benchmarks.evaluation.record import (
    Record,
    blocks_of,
    interval_of,
    losses_of,
    peaks_of,
    plain_of,
    since,
    steps_of,
)
from benchmarks.evaluation.systems import IN_PLACE_HOSTS, LIVE, OWN_FREQUENCY, STARTERS, reduce_of
from benchmarks.report import machine
from testbed.process_memory import peak_resident
from topologies.describe.topology import CONTROLLER, MGMT_NET, LabError, build, load
from topologies.lab import down
from topologies.training.job import JobPlan, TrainingJob, start_all, training_lab

WARM_UP: Final = 5
"""Iterations that are not timed: DDP rebuilds its buckets, and TCP windows open."""
_ENDLESS: Final = 1_000_000
_ADAPTING: Final = 40
"""Iterations in which a system that chooses its interval finds the one at which it stays."""
_LAB: Final = "evaluation"
_TEMPORARY: Final = "checkmate-evaluation-"
_TOPOLOGY: Final = "single_tor"
_BY_HOSTS: Final = {
    "title": "the ranks and shadow nodes of single_tor, without a switch",
    "copies": "host",
    "hosts": 4,
    "shadow_nodes": 2,
}
_LIGHTHOUSE_PORT: Final = 29510
_LIGHTHOUSE: Final = (
    *(sys.executable, packages.FOLDER / "bin" / "torchft_lighthouse"),
    *("--bind", f"[::]:{_LIGHTHOUSE_PORT}", "--min_replicas", "1"),
)


@dataclass(frozen=True)
class Folders:
    """Folders of a cell's job: for checkpoints `disk`, and one in a tmpfs; for its own records `out`."""

    disk: Path
    memory: Path
    out: Path


@dataclass(frozen=True)
class Here:
    """The conditions that all cells of a run have in common.

    Attributes:
        commit: The commit of this tree.
        scratch: A folder on the file system to which checkpoints go.
        failed: Where the logs of a cell that fails are kept.
    """

    commit: str
    scratch: Path
    failed: Path


def measure(cell: Cell, extent: MeasuredExtent, here: Here, progress: Progress) -> Record:
    """Return a cell's raw data.

    Raises:
        LabError: The job fails, although nobody has killed it.
    """
    with (
        tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=here.scratch) as disk,
        tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix=_TEMPORARY) as out,
        _saving_failures(Path(out), here.failed / cell.key),
    ):
        folders = Folders(Path(disk), Path(memory), Path(out))
        plan = _plan(cell, folders)
        topology = build(_LAB, _BY_HOSTS) if cell.system == IN_PLACE_HOSTS else load(_TOPOLOGY)
        with training_lab(topology, "softswitch", _LAB, plan, folders.out) as job:
            if cell.system == LIVE:
                cpus = {max(os.sched_getaffinity(0))}
                environment = {"PYTHONPATH": str(packages.FOLDER)}
                job.crew.start("lighthouse", CONTROLLER, _LIGHTHOUSE, cpus=cpus, environment=environment)
            start_all([job])
            began = time.monotonic()
            kills, end = _run(job, cell, extent, progress)
            helpers = tuple(peak_resident(member.process.pid) for member in job.shadows.values())
        logs = logs_in(folders.out)
    timed, failing = cell.kind == "throughput", cell.kind == "failures"
    return Record(
        commit=here.commit,
        day=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine(),
        file_system=file_system_of(here.scratch),
        steps=() if timed else steps_of(logs, began, alone=cell.system == LIVE),
        interval=interval_of(logs),
        kills=since(kills, began),
        ended=round(end - began, 4),
        losses=() if failing else losses_of(logs, LOSSES),
        system=blocks_of(logs) if timed else (),
        plain=plain_of(logs) if timed else 0.0,
        peaks=peaks_of(logs) if timed else (),
        helpers=helpers,
    )


@contextmanager
def _saving_failures(folder: Path, target: Path) -> Iterator[None]:
    """Copy a folder to `target` if the block raises `LabError`."""
    try:
        yield
    except LabError:
        shutil.copytree(folder, target, dirs_exist_ok=True)
        raise


def file_system_of(folder: Path) -> str:
    """Return the type of a folder's file system, such as ext4 or tmpfs."""
    stat = ["stat", "--file-system", "--format=%T", str(folder)]
    return subprocess.run(stat, capture_output=True, text=True, check=True).stdout.strip()


def _run(
    job: TrainingJob, cell: Cell, extent: MeasuredExtent, progress: Progress
) -> tuple[list[float], float]:
    """Let a job train to its end, or as long as is measured. Return when ranks were killed, and the end."""
    kills: list[float] = []
    if cell.kind == "failures":
        kills = fail_at_random(job, cell, extent, progress)
        end = time.monotonic()
        await_regained(job, kills, alone=cell.system == LIVE)
        return kills, end
    if cell.kind == "losses":
        kills = fail_every_second_iteration(job, progress)
    else:
        job.finish(SECONDS, lambda: progress(f"iteration {reached_iteration(job)}"))
    return kills, time.monotonic()


def _plan(cell: Cell, folders: Folders) -> JobPlan:
    arguments = {
        "workload": cell.workload,
        "system": cell.system,
        "interval": cell.interval,
        "iterations": LOSSES if cell.kind == "losses" else _ENDLESS,
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
        # All use the same links: gloo gets the training network, not mgmt, if there is one.
        environment={} if cell.system == IN_PLACE_HOSTS else {"GLOO_SOCKET_IFNAME": "data0"},
        starter="torchrun alone" if live else STARTERS.get(cell.system, "torchrun"),
    )


def _timed(cell: Cell) -> tuple[str, ...]:
    """Return the options for throughput. Every other start has the opposite order of blocks."""
    if cell.kind != "throughput":
        return ()
    profiling = cell.system == OWN_FREQUENCY and not cell.interval
    warm_up = PROFILED.stop + _ADAPTING if profiling else WARM_UP
    # A system that adapts must not see the other block as a long iteration.
    plain_first = cell.start % 2 and not profiling
    return ("--timed", "--warm-up", str(warm_up), *(["--plain-first"] if plain_first else []))


def clear(scratch: Path) -> None:
    """Remove what a killed measurement has left. Raise `LabInUse` if one is under way."""
    down(_LAB)
    for place in (scratch, Path("/dev/shm"), Path(tempfile.gettempdir())):
        for leftover in place.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
