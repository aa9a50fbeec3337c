"""The report of the training demo: losses, recovery, cost, promises."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from topologies.training.record import Interval, JobRecord, Recovery
from topologies.training.verdict import Cost, Promise

_ROWS: Final = 12


def show(
    reference: JobRecord, protected: JobRecord, promises: Sequence[Promise], cost: Cost, console: Console
) -> None:
    """Print everything, in the order of events."""
    console.print()
    console.print(losses(reference, protected))
    for recovery in protected.recoveries():
        console.print(parts(recovery))
    console.print(costs(cost))
    for promise in promises:
        mark = "[bold green]yes[/bold green]" if promise.kept else "[bold red]NO [/bold red]"
        console.print(f"{mark}  {promise.what}\n     {promise.seen}", highlight=False)


def losses(reference: JobRecord, protected: JobRecord) -> Table:
    """Return a table of losses at regular iterations, and around crashes."""
    table = _table("loss, mean of all ranks")
    for column in ("iteration", "uninterrupted", "protected", "equal"):
        table.add_column(column, justify="right", min_width=len(column))
    table.add_column("")
    ours, theirs = protected.curve, reference.curve
    notes = {}
    for r in protected.recoveries():
        notes[r.iteration] = f"kill -9 of rank {r.rank}"
        notes[r.resumed_with] = f"{notes.get(r.resumed_with, '')}; resumed here".lstrip("; ")
    step = max(len(theirs) // _ROWS, 1)
    for i in sorted({*range(0, len(theirs), step), *notes, len(theirs) - 1} & set(theirs)):
        ours_i = ours.get(i)
        shown = "-" if ours_i is None else f"{ours_i:.9f}"
        equal = "yes" if ours_i == theirs[i] else "NO"
        table.add_row(str(i), f"{theirs[i]:.9f}", shown, equal, notes.get(i, ""))
    return table


def parts(recovery: Recovery) -> Table:
    """Return a table of the parts of a recovery."""
    table = _table(f"from kill -9 of rank {recovery.rank} to the next trained iteration")
    table.add_column("part", no_wrap=True)
    table.add_column("seconds", justify="right")
    for name, seconds in recovery.parts.items():
        table.add_row(name, f"{seconds:.2f}")
    table.add_row("total", f"{recovery.seconds:.2f}", style="bold")
    return table


def costs(cost: Cost) -> Table | str:
    """Return a table of the paired differences per iteration."""
    pairs = len(cost.seconds.reference)
    if pairs < 2:
        return "cost to the trainers: not enough undisturbed blocks to compare"
    table = _table(
        f"cost to the trainers in ms per iteration: mean of {pairs} pairs of blocks (95% interval)"
    )
    for column in ("", "untagged", "protected: more", "more, %"):
        table.add_column(column, no_wrap=True, justify="right" if column else "left")
    for name, found in (("time", cost.seconds), ("processor", cost.processor)):
        row = (_milliseconds(found.difference), _percent(found.ratio))
        table.add_row(name, f"{1e3 * statistics.fmean(found.reference):.0f}", *row)
    return table


def _milliseconds(found: Interval) -> str:
    return f"{1e3 * found.mean:+.1f} ({1e3 * found.low:+.1f} to {1e3 * found.high:+.1f})"


def _percent(ratio: Interval) -> str:
    mean, low, high = (100 * (value - 1) for value in (ratio.mean, ratio.low, ratio.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
