"""The cost of protection for a sharded model (HSDP): time of an iteration, and the trainers' memory.

Time is compared with the same untagged ring by twins that take turns in the same processes. Memory is
compared with FSDP that averages replicas itself over gloo, in two labs one after another: more than the
reduced buckets and one staging bucket should not be needed.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped, number
from benchmarks.training.sharded_memory_rank import MESH
from benchmarks.training.twin_labs import cost, race
from checkmate.wire.layout import BUCKET_BYTES
from topologies.describe.topology import load
from topologies.training.job import JobPlan, training_lab
from topologies.training.orders import Reduce

TITLE: Final = (
    "Sharded model (HSDP): 2 replicas of 2 shards, bf16 with fp32 reduction, 4 ranks that share one core"
)
STARTS, TURNS = 3, 40
_TIMED: Final = ("--layers", "4", "--width", "320", "--heads", "5", "--batch", "8", "--accumulate", "1")
_LARGE: Final = (
    "--layers",
    "4",
    "--width",
    "1024",
    "--heads",
    "8",
    "--accumulate",
    "1",
    "--iterations",
    "10",
)
_SECONDS: Final = 600.0


def measure() -> list[Result]:
    """Return time and memory."""
    if os.geteuid() != 0:
        return [Skipped("sharded model", "needs root, for network namespaces")]
    lab = load("hsdp")
    with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder:
        raced = race(Path(folder, "twins"), lab, "benchmarks.training.sharded_twins", _TIMED, STARTS, TURNS)
        return [*cost(raced, len(lab.ranks)), *_memory(Path(folder))]


def _memory(folder: Path) -> list[Result]:
    """Return what each rank needs beyond native HSDP, when it needs most and between iterations."""
    with Progress(transient=True) as bar:
        task = bar.add_task("memory", total=2)
        protected = _train(folder / "job", "job", "checkmate")
        bar.advance(task)
        native = _train(folder / "native", "native", "gloo")
    buckets = [rank["buckets"] for rank in protected]
    note = f"buckets {number(sum(buckets) / len(buckets) / 1e6, 'MB')} a rank"
    results: list[Result] = []
    for key, name in (("peak", "within an iteration"), ("rest", "between iterations")):
        beyond = [
            (max(a[key]) - max(b[key]) - rank) / 1e6
            for a, b, rank in zip(protected, native, buckets, strict=True)
        ]
        results.append(
            Figure(
                f"memory {name}, beyond native HSDP and buckets",
                tuple(beyond),
                "MB",
                BUCKET_BYTES / 1e6,
                BUCKET_BYTES / 1e6,
                smaller=True,
                note=note,
            )
        )
    return results


def _train(folder: Path, mesh: str, reduce: Reduce) -> list[dict[str, Any]]:
    """Return what each rank has measured."""
    # Each tensor has pages of its own, which go when it does: malloc keeps none.
    environment = {MESH: mesh, "GLOO_SOCKET_IFNAME": "data0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    module = "benchmarks.training.sharded_memory_rank"
    plan = JobPlan(_LARGE, module=module, reduce=reduce, environment=environment)
    described = load("hsdp")
    with training_lab(described, "softswitch", "bench_memory", plan, folder) as job:
        job.start()
        job.finish(_SECONDS)
    return [
        json.loads((folder / f"rank{rank}.memory.json").read_text()) for rank in range(len(described.ranks))
    ]
