"""The report of the training demo: losses, recovery, cost, promises; and a plot of the losses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure
from rich.console import Console

from checkmate.output.tables import FittedTable
from topologies.training.record import Interval, JobRecord, RecoveryTime
from topologies.training.verdict import Cost, Promise

_ROWS: Final = 12


def show(
    reference: JobRecord, protected: JobRecord, promises: Sequence[Promise], cost: Cost, console: Console
) -> None:
    """Print everything, in the order of events."""
    console.print()
    console.print(losses(reference, protected))
    console.print(parts(protected.recoveries()))
    console.print(costs(cost))
    for promise in promises:
        mark = "[bold green]yes[/bold green]" if promise.is_kept else "[bold red]NO [/bold red]"
        console.print(f"{mark}  {promise.text}\n     {promise.observation}", highlight=False)


def losses(reference: JobRecord, protected: JobRecord) -> FittedTable:
    """Return a table of losses at regular iterations, and around crashes."""
    numbers = ("iteration", "uninterrupted", "protected", "equal")
    table = FittedTable("loss, mean of all ranks", *numbers, "", numbers=numbers, folds=("",))
    protected_curve, reference_curve = protected.curve, reference.curve
    notes = {}
    for r in protected.recoveries():
        notes[r.iteration] = f"kill -9 of rank {r.rank}{', in place' if r.in_place else ''}"
        notes[r.resumed_with] = f"{notes.get(r.resumed_with, '')}; resumed here".lstrip("; ")
    step = max(len(reference_curve) // _ROWS, 1)
    for i in sorted(
        {*range(0, len(reference_curve), step), *notes, len(reference_curve) - 1} & set(reference_curve)
    ):
        protected_loss = protected_curve.get(i)
        loss = "-" if protected_loss is None else f"{protected_loss:.9f}"
        equal = "yes" if protected_loss == reference_curve[i] else "NO"
        table.add_row(str(i), f"{reference_curve[i]:.9f}", loss, equal, notes.get(i, ""))
    return table


def parts(recoveries: Sequence[RecoveryTime]) -> FittedTable:
    """Return a table of the parts of each recovery, with a column for each."""
    columns = [f"rank {r.rank}: {'in place' if r.in_place else 'all restart'}" for r in recoveries]
    title = "seconds from kill -9 to the next trained iteration"
    table = FittedTable(title, "part", *columns, numbers=tuple(columns))
    for name in recoveries[0].parts if recoveries else ():
        table.add_row(name, *(f"{recovery.parts[name]:.2f}" for recovery in recoveries))
    table.add_row("total", *(f"{recovery.seconds:.2f}" for recovery in recoveries), style="bold")
    return table


def costs(cost: Cost) -> FittedTable | str:
    """Return a table of the paired differences per iteration."""
    pairs = len(cost.seconds.reference)
    if pairs < 2:
        return "cost to the trainers: not enough undisturbed blocks to compare"
    title = (
        f"cost to the trainers in ms per iteration: mean of {pairs} pairs of blocks (95% interval); two such "
        "jobs differ by up to 7% even without Checkmate"
    )
    numbers = ("untagged", "protected: more", "more, %")
    table = FittedTable(title, "", *numbers, numbers=numbers)
    for name, paired in (("time", cost.seconds), ("processor", cost.processor)):
        row = (_milliseconds(paired.difference), _percent(paired.ratio))
        table.add_row(name, f"{1e3 * statistics.fmean(paired.reference):.0f}", *row)
    return table


def _milliseconds(interval: Interval) -> str:
    return f"{1e3 * interval.mean:+.1f} ({1e3 * interval.low:+.1f} to {1e3 * interval.high:+.1f})"


def _percent(ratio: Interval) -> str:
    mean, low, high = (100 * (value - 1) for value in (ratio.mean, ratio.low, ratio.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def draw_losses(
    file: Path,
    reference: Mapping[int, float],
    protected: Mapping[int, float],
    recoveries: Sequence[RecoveryTime],
) -> None:
    """Write a PNG: the protected run's losses as dots on the line of the uninterrupted run."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*_points(reference), color="0.6", linewidth=4, label="uninterrupted")
    axes.plot(
        *_points(protected), "o", color="C0", markersize=3.5, label="protected by Checkmate, ranks killed"
    )
    for recovery in recoveries:
        way = "in place" if recovery.in_place else "all restarted"
        event = f"rank {recovery.rank}: kill -9 in {recovery.phase}\n{way}: {recovery.seconds:.1f} s"
        axes.axvline(recovery.iteration, color="C3", linewidth=1)
        axes.annotate(
            f"{event}, at iteration {recovery.resumed_with}",
            (recovery.iteration, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            color="C3",
            fontsize=9,
        )
    axes.set(xlabel="iteration", ylabel="loss in nats per byte, mean of all ranks")
    axes.legend(loc="lower left")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _points(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())
