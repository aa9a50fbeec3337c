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
from checkmate.base.wording import counted
from checkmate.output.consoles import progress, text_console
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
    copy_loss: float = 0.0,
) -> Blocks:
    """Return each pair of turns of the twins that `module` trains in a lab, from several starts.

    Unless `pinned`, processes use all cores. A race that is stopped prints the `results` of the starts that
    ended, or of the first one as far as it came; `cost`, if none are given. `copy_loss`: as for a lab.
    """
    ranks = len(topology.ranks)
    blocks_by_kind: dict[str, list[TimedBlock]] = defaultdict(list)
    with _progress_display(starts * turns) as show:
        for seed in range(starts):
            options = (*arguments, "--iterations", str(turns), "--seed", str(seed))
            plan = JobPlan(options, module=module, environment=environment or {})
            place = folder / str(seed)
            lab = training_lab(
                *(topology, "softswitch", "bench_twins", plan, place), pinned=pinned, copy_loss=copy_loss
            )
            with lab as job:
                start_all([job])
                turns_done = partial(twins.turns, place, ranks)
                try:
                    job.finish(_SECONDS, lambda: show(seed * turns + turns_done()))  # noqa: B023
                except (KeyboardInterrupt, SystemExit):
                    title = f"Stopped after {counted(seed, 'start')} of {starts}"
                    if not seed and turns_done():
                        _add(blocks_by_kind, twins.read(place, ranks, one_core=pinned))
                        title = "Stopped in the first start, before the waiting threads' time was measured"
                    if all(len(blocks) > 1 for blocks in blocks_by_kind.values()) and blocks_by_kind:
                        text_console(stderr=True).print(
                            table(title, (results or cost)(blocks_by_kind, ranks))
                        )
                    raise
            _add(blocks_by_kind, twins.read(place, ranks, one_core=pinned))
    return blocks_by_kind


def _add(blocks_by_kind: dict[str, list[TimedBlock]], more: Blocks) -> None:
    for kind, blocks in more.items():
        blocks_by_kind[kind] += blocks


@contextmanager
def _progress_display(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many turns are done: a bar on a terminal, else a line now and then."""
    last_line = time.monotonic()

    def show(completed: int) -> None:
        nonlocal last_line
        bar.update(task, completed=completed)
        if bar.disable and time.monotonic() > last_line + _LINE_SECONDS:
            last_line = time.monotonic()
            console.print(f"{completed} of {total} turns of twins")

    console = text_console(stderr=True)
    with progress(console) as bar:
        task = bar.add_task("twins", total=total)
        yield show


def cost(
    blocks: Blocks,
    ranks: int,
    base: str = "the same ring untagged",
    *,
    aim: float | None = 1.01,
    floor: float | None = 1.03,
) -> list[Result]:
    """Return what protection costs in comparison with the `base`, beside the control."""
    protected, plain, control = (blocks[kind] for kind in twins.KINDS)
    time = ratios([block.seconds for block in protected], [block.seconds for block in plain])
    level = ratios([block.seconds for block in control], [block.seconds for block in plain])
    processor = ratios([block.processor for block in protected], [block.processor for block in plain])
    # The cost per rank is constant, so this determines the ratio for iterations of another length.
    more = [1000 * (a.processor - b.processor) / ranks for a, b in zip(protected, plain, strict=True)]
    return [
        Figure(f"Checkmate / {base}", time, "", aim, floor, smaller=True, note=spread95(time)),
        Figure("control: a second such twin / the first", level, "", note=spread95(level)),
        Figure("processor time of all ranks", processor, "", smaller=True, note=spread95(processor)),
        Figure("the difference in processor time per rank", tuple(more), "ms", note=spread95(more)),
        *absolute({kind: blocks[kind] for kind in twins.KINDS}),
    ]


def absolute(blocks_by_name: Blocks) -> list[Result]:
    """Return seconds by name."""
    return [
        Figure(f"absolute: {name}", tuple(block.seconds for block in blocks), "s")
        for name, blocks in blocks_by_name.items()
    ]
