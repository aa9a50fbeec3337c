"""The training demo's end as people read it: losses, recovery, cost, promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from topologies.training_record import Record, Recovery
from topologies.training_verdict import Cost, Promise

_ROWS: Final = 12


def show(
    reference: Record, protected: Record, promises: Sequence[Promise], cost: Cost, console: Console
) -> None:
    """Everything, in the order of the story."""
    console.print()
    console.print(losses(reference, protected))
    for recovery in protected.recoveries():
        console.print(parts(recovery))
    console.print(cost_line(cost) + "\n", highlight=False)
    for promise in promises:
        mark = "[bold green]yes[/bold green]" if promise.kept else "[bold red]NO [/bold red]"
        console.print(f"{mark}  {promise.what}\n     {promise.seen}", highlight=False)


def losses(reference: Record, protected: Record) -> Table:
    """Every few iterations, and those round a crash."""
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
    """From the kill to the end of the next trained iteration."""
    table = _table(f"from kill -9 of rank {recovery.rank} to the next trained iteration")
    table.add_column("part", no_wrap=True)
    table.add_column("seconds", justify="right")
    for name, seconds in recovery.parts.items():
        table.add_row(name, f"{seconds:.2f}")
    table.add_row("together", f"{recovery.seconds:.2f}", style="bold")
    return table


def cost_line(cost: Cost) -> str:
    """The paired difference of iteration times."""
    if len(cost.reference) < 2:
        return "cost to the trainers: not enough undisturbed blocks to compare"
    seconds, ratio = cost.difference, cost.ratio
    mean = sum(cost.reference) / len(cost.reference)
    return (
        f"cost to the trainers: {1e3 * seconds.mean:+.1f} ms an iteration of {1e3 * mean:.0f} ms "
        f"(95% interval {1e3 * seconds.low:+.1f} to {1e3 * seconds.high:+.1f} ms), "
        f"{100 * (ratio.mean - 1):+.1f}% ({100 * (ratio.low - 1):+.1f}% to {100 * (ratio.high - 1):+.1f}%), "
        f"over {seconds.samples} pairs of blocks, against the same ring without tags and shadow nodes"
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
