"""Time from kill -9 of a rank to the end of the next trained iteration, in parts; several kills per run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped
from topologies.describe.topology import load
from topologies.training.job import JobPlan, start_all, training_lab
from topologies.training.orders import Kill
from topologies.training.record import RecoveryTime

TITLE: Final = (
    "Recovery: kill -9 of a rank to the next trained iteration, a GPT of 5 million parameters on 4 ranks"
)
KILLS: Final = (
    Kill(2, 10, "all-gather"),
    Kill(0, 20, "forward", attempt=1),
    Kill(3, 30, "reduce-scatter", attempt=2),
    Kill(1, 40, "before the step", attempt=3),
    Kill(3, 50, "all-gather", attempt=4),
)
_ITERATIONS: Final = 60
_SECONDS: Final = 600.0
_BYTECODE: Final = {"PYTHONDONTWRITEBYTECODE": ""}
"""Environment in which Python keeps bytecode, as it does for users, whatever this shell says."""
_OURS_SECONDS: Final = 1.0


def measure() -> list[Result]:
    """Return every figure of this module, with a sample for each kill."""
    if os.geteuid() != 0:
        return [Skipped("recovery", "needs root, for network namespaces")]
    plan = JobPlan(
        ("--iterations", str(_ITERATIONS)), kills=KILLS, restarts=len(KILLS), environment=_BYTECODE
    )
    with (
        tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder,
        Progress(transient=True) as bar,
        training_lab(load("single_tor"), "softswitch", "bench_recovery", plan, Path(folder)) as job,
    ):
        task = bar.add_task("recovery", total=_ITERATIONS)
        start_all([job])
        job.finish(_SECONDS, lambda: bar.update(task, completed=job.next_iteration()))
        record = job.record()
    recoveries = record.recoveries()
    if len(recoveries) != len(KILLS):
        raise RuntimeError(f"training recovered from {len(recoveries)} of {len(KILLS)} kills")
    repeated = float(sum(count - 1 for count in record.repeated.values()))
    return [
        *_figures(recoveries),
        Figure("completed iterations repeated, all kills together", (repeated,), ""),
    ]


def _figures(recoveries: list[RecoveryTime]) -> list[Result]:
    parts = [
        Figure(part, tuple(recovery.parts[part] for recovery in recoveries), "s")
        for part in recoveries[0].parts
    ]
    calls = [part.samples for part in parts if part.name.startswith("checkmate")]
    totals = tuple(sum(seconds) for seconds in zip(*calls, strict=True))
    return [
        Figure("together", tuple(recovery.seconds for recovery in recoveries), "s"),
        *parts,
        Figure("import, restore and protect", totals, "s", _OURS_SECONDS, _OURS_SECONDS, smaller=True),
    ]
