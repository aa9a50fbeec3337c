"""The paper's shadow-scaling figure: pull and step of shadow nodes against the iteration, by batch size.

Jobs run in turn, each with its own batch size. Trainers share one core; switch, controller and shadow nodes
share another. It also writes a plot, `PICTURE`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure as Picture
from rich.progress import track

from benchmarks.figures import Figure, Result, Skipped
from topologies.describe.topology import load
from topologies.training.job import JobPlan, TrainingJob, start_all, training_lab

BATCHES: Final = (1, 2, 4, 8, 16)
TITLE: Final = (
    "Shadow nodes' pull and step against the iteration, by batch size: "
    "4 ranks on one core, 2 shadow nodes on another"
)
PICTURE: Final = Path("out/bench/batches.png")
_WARM_UP: Final = 4
_TIMED: Final = 8
_SECONDS: Final = 300.0


@dataclass(frozen=True)
class Times:
    """Seconds of each iteration of a job, and of each observed pull and step of its shadow nodes."""

    iterations: Sequence[float]
    pulls: Sequence[float]
    steps: Sequence[float]


def measure() -> list[Result]:
    """Return every figure of this module, and write the plot."""
    if os.geteuid() != 0:
        return [Skipped("batches", "needs root, for network namespaces")]
    times_by_batch = {batch: _times(batch) for batch in track(BATCHES, "batches", transient=True)}
    draw(PICTURE, times_by_batch)
    return [result for batch, times in times_by_batch.items() for result in _figures(batch, times)]


def _times(batch: int) -> Times:
    plan = JobPlan(("--iterations", "1000000", "--batch", str(batch)), gated=True)
    with (
        tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder,
        training_lab(load("single_tor"), "softswitch", "bench_batch", plan, Path(folder)) as job,
    ):
        start_all([job])
        _train(job, _WARM_UP)
        nodes = [host.number for host in job.crew.lab.topology.shadow_nodes]
        before = {node: len(job.statuses(node)) for node in nodes}
        _train(job, _WARM_UP + _TIMED)
        record = job.record()
        iterations = [
            max(rank.ended for rank in record.timed[iteration])
            - min(rank.began for rank in record.timed[iteration])
            for iteration in range(_WARM_UP, _WARM_UP + _TIMED - 1)
        ]
        # One per second: the first may still be of the warm-up.
        statuses = [status for node in nodes for status in job.statuses(node)[before[node] + 1 :]]
    return Times(
        iterations,
        [status["pull_seconds"] for status in statuses],
        [status["step_seconds"] for status in statuses],
    )


def _train(job: TrainingJob, until: int) -> None:
    job.let(until)
    job.await_iterations(until, _SECONDS)


def _figures(batch: int, times: Times) -> list[Result]:
    iteration = statistics.median(times.iterations)
    busy = tuple((pull + step) / iteration for pull, step in zip(times.pulls, times.steps, strict=True))
    parts = {"iteration": times.iterations, "pull": times.pulls, "step": times.steps}
    note = ", ".join(f"{name} {1e3 * statistics.median(seconds):.0f} ms" for name, seconds in parts.items())
    return [Figure(f"batch {batch}: (pull + step) / iteration", busy, "", note=note)]


def draw(file: Path, times_by_batch: Mapping[int, Times]) -> None:
    """Write a PNG like the paper's: iteration solid, pull dashed, the step shaded above it."""
    picture = Picture(figsize=(7, 4), layout="constrained")
    axes = picture.add_subplot()
    batches = list(times_by_batch)
    iteration, pull, step = (
        [1e3 * statistics.median(getattr(times, name)) for times in times_by_batch.values()]
        for name in ("iterations", "pulls", "steps")
    )
    busy = [a + b for a, b in zip(pull, step, strict=True)]
    axes.plot(batches, iteration, "o-", color="black", label="iteration of the trainers")
    axes.fill_between(batches, pull, busy, color="0.75", label="shadow node steps")
    axes.plot(batches, pull, "s--", color="0.35", label="shadow node pulls gradients")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="batch size per rank, in sequences of 64 bytes", ylabel="time in ms (medians)")
    axes.legend(loc="upper left")
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, dpi=120)
