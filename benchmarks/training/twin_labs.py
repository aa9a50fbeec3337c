"""Twins in labs: several starts of `benchmarks.training.twins`, and what the protected one costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, Result, ratios, spread95, table
from benchmarks.training import twins
from checkmate.output.consoles import progress, text_console
from checkmate.wording import counted
from topologies.describe.topology import Topology
from topologies.training.job import JobPlan, start_all, training_lab
from topologies.training.record import TimedBlock

_SECONDS: Final = 1800.0
_LINE_SECONDS: Final = 15.0

Blocks = Mapping[str, list[TimedBlock]]
"""Blocks by name; those of one round or pair have the same index."""


def race(
    folder: Path,
    topology: Topology,
    module: str,
    arguments: tuple[str, ...],
    starts: int,
    turns: int,
    environment: Mapping[str, str] | None = None,
    *,
    pinned: bool = True,
    results: Callable[[Blocks, int], list[Result]] | None = None,
) -> Blocks:
    """Return each pair of turns of the twins that `module` trains in a lab, from several starts.

    Unless `pinned`, processes use all cores. A race that is stopped prints the `results` of the starts that
    ended, or of the first one as far as it came; `cost`, if none are given.
    """
    ranks = len(topology.ranks)
    found: dict[str, list[TimedBlock]] = defaultdict(list)
    with _shown(starts * turns) as show:
        for seed in range(starts):
            options = (*arguments, "--iterations", str(turns), "--seed", str(seed))
            plan = JobPlan(options, module=module, environment=environment or {})
            place = folder / str(seed)
            with training_lab(topology, "softswitch", "bench_twins", plan, place, pinned=pinned) as job:
                start_all([job])
                done = partial(twins.turns, place, ranks)
                try:
                    job.finish(_SECONDS, lambda: show(seed * turns + done()))  # noqa: B023
                except (KeyboardInterrupt, SystemExit):
                    title = f"Stopped after {counted(seed, 'start')} of {starts}"
                    if not seed and done():
                        _add(found, twins.read(place, ranks, one_core=pinned))
                        title = "Stopped in the first start, before the waiting threads' time was measured"
                    if all(len(blocks) > 1 for blocks in found.values()) and found:
                        text_console(stderr=True).print(table(title, (results or cost)(found, ranks)))
                    raise
            _add(found, twins.read(place, ranks, one_core=pinned))
    return found


def _add(found: dict[str, list[TimedBlock]], more: Blocks) -> None:
    for kind, blocks in more.items():
        found[kind] += blocks


@contextmanager
def _shown(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many turns are done: a bar on a terminal, else a line now and then."""
    told = time.monotonic()

    def show(completed: int) -> None:
        nonlocal told
        bar.update(task, completed=completed)
        if bar.disable and time.monotonic() > told + _LINE_SECONDS:
            told = time.monotonic()
            console.print(f"{completed} of {total} turns of twins")

    console = text_console(stderr=True)
    with progress(console) as bar:
        task = bar.add_task("twins", total=total)
        yield show


def cost(
    found: Blocks,
    ranks: int,
    others: str = "the same ring untagged",
    *,
    aim: float | None = 1.01,
    floor: float | None = 1.03,
) -> list[Result]:
    """Return what protection costs in comparison with the `others`, beside the control."""
    ours, theirs, control = (found[kind] for kind in twins.KINDS)
    time = ratios([one.seconds for one in ours], [one.seconds for one in theirs])
    level = ratios([one.seconds for one in control], [one.seconds for one in theirs])
    used = ratios([one.processor for one in ours], [one.processor for one in theirs])
    # The cost per rank is constant, so this determines the ratio for iterations of another length.
    more = [1000 * (a.processor - b.processor) / ranks for a, b in zip(ours, theirs, strict=True)]
    return [
        Figure(f"Checkmate / {others}", time, "", aim, floor, smaller=True, note=spread95(time)),
        Figure("control: a second such twin / the first", level, "", note=spread95(level)),
        Figure("processor time of all ranks", used, "", smaller=True, note=spread95(used)),
        Figure("the difference in processor time per rank", tuple(more), "ms", note=spread95(more)),
        *absolute({kind: found[kind] for kind in twins.KINDS}),
    ]


def absolute(found: Blocks) -> list[Result]:
    """Return seconds by name."""
    return [
        Figure(f"absolute: {name}", tuple(block.seconds for block in blocks), "s")
        for name, blocks in found.items()
    ]
