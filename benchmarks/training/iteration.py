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
from functools import partial
from pathlib import Path
from typing import Final

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped, ratios, spread95
from benchmarks.training import saving, twins
from topologies.describe.topology import load
from topologies.training.job import JobPlan, TrainingJob, start_all, training_lab
from topologies.training.record import TimedBlock

BATCH: Final = 8
TITLE: Final = (
    f"Iteration time: a GPT of 5 million parameters, {BATCH} x 64 bytes per rank, 4 ranks that share one core"
)
ROUNDS: Final = 3
STARTS, TURNS = 3, 50
"""Jobs of twins, and turns in each: the machine's speed varies by a tenth from one second to the next."""
SAVES: Final = {f"{what} {every}": every for what in ("torch.save", "async_save") for every in (1, 5, 20)}
"""Modes of `benchmarks.training.saving`, with the number of iterations between two checkpoints."""
_WARM_UP: Final = 20
_BLOCK_SECONDS: Final = 300.0
_TWINS_SECONDS: Final = 1800.0

Blocks = Mapping[str, list[TimedBlock]]
"""Blocks by name; those of one round or pair have the same index."""


def measure() -> list[Result]:
    """Return every figure of this module; the blocks of a round are consecutive."""
    if os.geteuid() != 0:
        return [Skipped("iteration time", "needs root, for network namespaces")]
    with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder:
        cost = _cost(_twins(Path(folder, "twins")))
        with _jobs(Path(folder)) as jobs:
            return [*cost, *_saving(_race(jobs))]


def _twins(folder: Path) -> Blocks:
    """Return each turn of both twins."""
    topology = load("single_tor")
    ranks = len(topology.ranks)
    found: dict[str, list[TimedBlock]] = defaultdict(list)
    with Progress(transient=True) as bar:
        task = bar.add_task("twins", total=STARTS * TURNS)
        for seed in range(STARTS):
            arguments = ("--iterations", str(TURNS), "--batch", str(BATCH), "--seed", str(seed))
            plan, place = JobPlan(arguments, module="benchmarks.training.twins"), folder / str(seed)
            with training_lab(topology, "softswitch", "bench_twins", plan, place) as job:
                start_all([job])
                done = partial(twins.turns, place, ranks)
                job.finish(_TWINS_SECONDS, lambda: bar.update(task, completed=seed * TURNS + done()))  # noqa: B023
            for kind, blocks in twins.read(place, ranks).items():
                found[kind] += blocks
    return found


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
            _block(job, _WARM_UP)  # DDP rebuilds its buckets, TCP windows open
        yield jobs


def _race(jobs: Mapping[str, TrainingJob]) -> Blocks:
    found: dict[str, list[TimedBlock]] = defaultdict(list)
    with Progress(transient=True) as bar:
        task = bar.add_task("iteration", total=ROUNDS * (2 + len(SAVES)))
        for number in range(ROUNDS):
            modes = ("checkmate", "nothing", *SAVES)
            for mode in modes if number % 2 == 0 else modes[::-1]:
                timed = max(10, SAVES.get(mode, 1))  # a multiple of the interval between checkpoints
                job = jobs["checkmate" if mode == "checkmate" else "gloo"]
                found[mode].append(_block(job, 1 + timed, mode))
                bar.advance(task)
    return found


def _block(job: TrainingJob, iterations: int, mode: str = "") -> TimedBlock:
    """Train a block; return the mean of its iterations without the first, which waits for its turn."""
    first = job.next_iteration()
    job.let(first + iterations, mode)
    job.await_iterations(first + iterations, _BLOCK_SECONDS)
    timed: list[TimedBlock] = []

    def noted() -> bool:
        found = job.record().block(first + 1, first + iterations)
        timed[:] = [] if found is None else [found]
        return found is not None

    job.crew.wait(noted, "the ranks' records", _BLOCK_SECONDS)
    return timed[0]


def _cost(found: Blocks) -> list[Result]:
    ours, theirs = (found[kind] for kind in twins.KINDS)
    time = ratios([one.seconds for one in ours], [one.seconds for one in theirs])
    used = ratios([one.processor for one in ours], [one.processor for one in theirs])
    ranks = len(load("single_tor").ranks)
    # The cost per rank is constant, so this determines the ratio for iterations of another length.
    more = [1000 * (a.processor - b.processor) / ranks for a, b in zip(ours, theirs, strict=True)]
    return [
        Figure("Checkmate / the same ring untagged", time, "", 1.01, 1.03, smaller=True, note=spread95(time)),
        Figure("the same in processor time of all ranks", used, "", smaller=True, note=spread95(used)),
        Figure("the difference in processor time per rank", tuple(more), "ms", note=spread95(more)),
        *_absolute({kind: found[kind] for kind in twins.KINDS}),
    ]


def _saving(found: Blocks) -> list[Result]:
    seconds = {name: [block.seconds for block in blocks] for name, blocks in found.items()}
    plain = seconds["nothing"]
    ours = ratios(seconds["checkmate"], plain)
    results: list[Result] = [Figure("Checkmate / gloo without checkpoints", ours, "", smaller=True)]
    for mode in SAVES:
        what, _, every = mode.partition(" ")
        name = f"gloo with {what} every {every} / gloo without checkpoints"
        results.append(Figure(name, ratios(seconds[mode], plain), "", smaller=True))
    return results + _absolute({"gloo": found["nothing"]})


def _absolute(found: Blocks) -> list[Result]:
    return [
        Figure(f"absolute: {name}", tuple(block.seconds for block in blocks), "s")
        for name, blocks in found.items()
    ]
