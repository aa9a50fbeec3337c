"""Iteration time with Checkmate, without, and with checkpoints that training saves itself.

Three jobs in labs of their own take turns, block by block: Checkmate; the same ring untagged, without shadow
nodes; DDP over gloo on the same kind of links, which in some blocks saves its state. Trainers share one core;
switches, controllers and shadow nodes another.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.progress import Progress

from benchmarks import saving
from benchmarks.figures import Figure, Result, Skipped, ratios
from topologies.describe import load
from topologies.side_by_side import cores, start, training_lab
from topologies.training import Plan, Training
from topologies.training_record import Block, interval

BATCH: Final = 8
TITLE: Final = (
    f"Iteration time: a GPT of 5 million parameters, {BATCH} x 64 bytes a rank, 4 ranks that share one core"
)
ROUNDS: Final = 3
PAIRS: Final = 10
"""Of blocks of Checkmate and of the untagged ring, in each round."""
SHORT: Final = 6
SAVES: Final = {f"{what} {every}": every for what in ("torch.save", "async_save") for every in (1, 5, 20)}
"""Modes of `benchmarks.saving`, and after how many iterations each saves."""
_WARM_UP: Final = 20
_BLOCK_SECONDS: Final = 300.0

Blocks = Mapping[str, list[Block]]
"""By what was measured; those of one round, or pair, have the same index."""


def measure() -> list[Result]:
    """Every figure of this module; the blocks of one round follow each other directly."""
    if os.geteuid() != 0:
        return [Skipped("iteration time", "needs root, for network namespaces")]
    with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder, _jobs(Path(folder)) as jobs:
        return _figures(_race(jobs))


@contextlib.contextmanager
def _jobs(folder: Path) -> Iterator[dict[str, Training]]:
    """The three jobs, ready to begin."""
    # DDP averages over the same links as the ring: gloo takes the training network, not mgmt.
    gloo = {"GLOO_SOCKET_IFNAME": "data0", saving.FOLDER: str(folder)}
    endless = ("--iterations", "1000000", "--batch", str(BATCH))
    plans = {
        "checkmate": Plan(endless, gated=True),
        "untagged": Plan(endless, gated=True, reduce="untagged"),
        "gloo": Plan(endless, gated=True, reduce="gloo", extension="benchmarks.saving", environment=gloo),
    }
    with contextlib.ExitStack() as labs:
        jobs = {
            name: labs.enter_context(
                training_lab(
                    load("single_tor"), "softswitch", f"bench_{name}", plan, folder / name, cores(), _quietly
                )
            )
            for name, plan in plans.items()
        }
        start(jobs.values())
        for job in jobs.values():
            _block(job, _WARM_UP)  # DDP builds its buckets anew, windows open
        yield jobs


def _race(jobs: Mapping[str, Training]) -> Blocks:
    found: dict[str, list[Block]] = defaultdict(list)
    with Progress(transient=True) as bar:
        task = bar.add_task("iteration", total=ROUNDS * (2 * PAIRS + 1 + len(SAVES)))
        for number in range(ROUNDS):
            for pair in range(PAIRS):
                order = ("checkmate", "untagged")
                for name in order if pair % 2 == 0 else order[::-1]:
                    found[name].append(_block(jobs[name], SHORT))
                    bar.advance(task)
            modes = ("nothing", *SAVES)
            for mode in modes if number % 2 == 0 else modes[::-1]:
                timed = max(10, SAVES.get(mode, 1))  # a whole number of times what is saved
                found[mode].append(_block(jobs["gloo"], 1 + timed, mode))
                bar.advance(task)
    return found


def _block(job: Training, iterations: int, mode: str = "") -> Block:
    """Train so many iterations; what one takes, without the first, which waits for its turn."""
    first = job.next_iteration()
    job.let(first + iterations, mode)
    job.await_iterations(first + iterations, _BLOCK_SECONDS)
    timed: list[Block] = []

    def noted() -> bool:
        found = job.record().block(first + 1, first + iterations)
        timed[:] = [] if found is None else [found]
        return found is not None

    job.crew.wait(noted, "the ranks' notes", _BLOCK_SECONDS)
    return timed[0]


def _figures(found: Blocks) -> list[Result]:
    seconds = {name: [block.seconds for block in blocks] for name, blocks in found.items()}
    processor = {name: [block.processor for block in blocks] for name, blocks in found.items()}
    ours, untagged, plain = seconds["checkmate"], seconds["untagged"], seconds["nothing"]
    rounds = [statistics.fmean(ours[i : i + PAIRS]) for i in range(0, len(ours), PAIRS)]
    time, used = ratios(ours, untagged), ratios(processor["checkmate"], processor["untagged"])
    # What a rank pays is fixed: from this, the ratio of any other iteration.
    extra = [1000 * (a - b) / 4 for a, b in zip(processor["checkmate"], processor["untagged"], strict=True)]
    results: list[Result] = [
        Figure("Checkmate / the same ring untagged", time, "", 1.01, 1.03, smaller=True, note=_mean(time)),
        Figure("the same in processor time of all ranks", used, "", smaller=True, note=_mean(used)),
        Figure("more processor time, each rank", tuple(extra), "ms", smaller=True, note=_mean(extra)),
        Figure("Checkmate / gloo without checkpoints", ratios(rounds, plain), "", smaller=True),
    ]
    for mode in SAVES:
        what, _, every = mode.partition(" ")
        name = f"gloo with {what} every {every} / gloo without checkpoints"
        results.append(Figure(name, ratios(seconds[mode], plain), "", smaller=True))
    absolute = {"gloo" if name == "nothing" else name: times for name, times in seconds.items()}
    return results + [Figure(f"absolute: {name}", tuple(times), "s") for name, times in absolute.items()]


def _mean(samples: Sequence[float]) -> str:
    """With its 95% interval."""
    found = interval(samples)
    return f"mean {found.mean:.4g}, 95% {found.low:.4g} to {found.high:.4g}"


def _quietly(_: str) -> None:
    """Nothing is said of each lab's steps."""
