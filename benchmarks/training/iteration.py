"""Iteration time with Checkmate, without it, and with checkpoints that training saves itself.

The comparison with the same untagged ring uses twins that take turns in the same processes
(`benchmarks.training.twins`). The comparison with DDP over gloo, which saves its state in some blocks, uses
two jobs that take turns in two labs with the same kind of links. Trainers share one core; switches,
controllers and shadow nodes share another.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped, ratios
from benchmarks.training import saving
from benchmarks.training.blocks import WARM_UP, block
from benchmarks.training.twin_labs import Blocks, absolute, cost, race
from topologies.describe.topology import load
from topologies.training.job import JobPlan, TrainingJob, start_all, training_lab
from topologies.training.record import TimedBlock

BATCH: Final = 8
TITLE: Final = (
    f"Iteration time: a GPT of 5 million parameters, {BATCH} x 64 bytes per rank, 4 ranks that share one core"
)
ROUNDS: Final = 3
STARTS, TURNS = 3, 100
"""Jobs of twins, and turns in each: the machine's speed varies by a tenth from one second to the next."""
SAVES: Final = {
    f"{method} {interval}": interval for method in ("torch.save", "async_save") for interval in (1, 5, 20)
}
"""Modes of `benchmarks.training.saving`, with the number of iterations between two checkpoints."""


def measure() -> list[Result]:
    """Return every figure of this module; the blocks of a round are consecutive."""
    if os.geteuid() != 0:
        return [Skipped("iteration time", "needs root, for network namespaces")]
    lab = load("single_tor")
    with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder:
        raced = race(
            Path(folder, "twins"),
            lab,
            "benchmarks.training.twins",
            ("--batch", str(BATCH)),
            STARTS,
            TURNS,
        )
        costs = cost(raced, len(lab.ranks))
        with _jobs(Path(folder)) as jobs:
            return [*costs, *_saving_results(_race(jobs))]


@contextlib.contextmanager
def _jobs(folder: Path) -> Iterator[dict[str, TrainingJob]]:
    """Yield jobs with Checkmate and gloo, ready to begin."""
    # DDP uses the same links as the ring: gloo gets the training network, not mgmt.
    gloo = {"GLOO_SOCKET_IFNAME": "data0", saving.FOLDER: str(folder)}
    endless = ("--iterations", "1000000", "--batch", str(BATCH))
    plans = {
        "checkmate": JobPlan(endless, gated=True),
        "gloo": JobPlan(
            endless, gated=True, reduce="gloo", extension="benchmarks.training.saving", environment=gloo
        ),
    }
    with contextlib.ExitStack() as labs:
        jobs = {
            name: labs.enter_context(
                training_lab(load("single_tor"), "softswitch", f"bench_{name}", plan, folder / name)
            )
            for name, plan in plans.items()
        }
        start_all(jobs.values())
        for job in jobs.values():
            block(job, WARM_UP)  # DDP rebuilds its buckets, TCP windows open
        yield jobs


def _race(jobs: Mapping[str, TrainingJob]) -> Blocks:
    blocks: dict[str, list[TimedBlock]] = defaultdict(list)
    with Progress(transient=True) as bar:
        task = bar.add_task("iteration", total=ROUNDS * (2 + len(SAVES)))
        for number in range(ROUNDS):
            modes = ("checkmate", "nothing", *SAVES)
            for mode in modes if number % 2 == 0 else modes[::-1]:
                timed = max(10, SAVES.get(mode, 1))  # a multiple of the interval between checkpoints
                job = jobs["checkmate" if mode == "checkmate" else "gloo"]
                blocks[mode].append(block(job, 1 + timed, mode))
                bar.advance(task)
    return blocks


def _saving_results(blocks_by_mode: Blocks) -> list[Result]:
    seconds = {name: [block.seconds for block in blocks] for name, blocks in blocks_by_mode.items()}
    plain = seconds["nothing"]
    pairs = ratios(seconds["checkmate"], plain)
    results: list[Result] = [Figure("Checkmate / gloo without checkpoints", pairs, "", smaller=True)]
    for mode in SAVES:
        method, _, interval = mode.partition(" ")
        name = f"gloo with {method} every {interval} / gloo without checkpoints"
        results.append(Figure(name, ratios(seconds[mode], plain), "", smaller=True))
    return results + absolute({"gloo": blocks_by_mode["nothing"]})
