"""The result of `checkmate profile` as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from checkmate.base.wording import counted, size
from checkmate.output.tables import FittedTable
from checkmate.planner.profile.sizing import Sizing
from checkmate.planner.scaling import Profile, StepTimes, outliers
from checkmate.planner.units import show_seconds


@dataclass(frozen=True)
class ProfileFigure:
    """A measurement with some NICs or threads. `outlier` describes a contradiction to others, if any."""

    what: str
    parts: str
    figure: str
    outlier: str


def figures(profile: Profile) -> list[ProfileFigure]:
    """Return all measurements."""
    rates = profile.receive_bytes_per_s
    odd = outliers({nics: 1 / rate for nics, rate in rates.items()})
    label = "receiving into buckets, loopback"
    result = [
        ProfileFigure(label, counted(nics, "NIC"), f"{rate * 8e-9:.3g} Gbit/s", odd.get(nics, ""))
        for nics, rate in rates.items()
    ]
    for step in profile.steps:
        odd = outliers(step.seconds)
        label = f"{step.optimizer} step of {step.model}"
        for threads, took in step.seconds.items():
            result.append(
                ProfileFigure(label, counted(threads, "thread"), show_seconds(took), odd.get(threads, ""))
            )
    return result


def measured(figures: Sequence[ProfileFigure]) -> FittedTable:
    """Return a table of measurements."""
    odd = ("outlier",) if any(figure.outlier for figure in figures) else ()
    columns = ("what", "with", "figure", *odd)
    table = FittedTable("this machine, measured", *columns, numbers=("figure",), folds=("what",))
    for figure_row in figures:
        table.add_row(
            figure_row.what,
            figure_row.parts,
            figure_row.figure,
            *(Text(figure_row.outlier, "yellow") for _ in odd),
        )
    return table


def predicted(
    name: str, times: StepTimes, sizings: Sequence[Sizing], iteration_s: float | None
) -> FittedTable:
    """Return a table of a model on 1, 2, ... nodes."""
    most = max(times.seconds)
    cores = sizings[0].cores
    beyond = f", from {counted(most, 'core')} to {cores:,} per node" if cores > most else ""
    title = f"{name}, {times.dtype}, predicted{beyond}"
    numbers = ("nodes", "cores", "step", "receiving", "memory")
    enough = "enough memory" if iteration_s is None else f"enough for {show_seconds(iteration_s)}"
    table = FittedTable(title, *numbers, enough, numbers=numbers)
    for sizing in sizings:
        table.add_row(
            str(sizing.nodes),
            str(sizing.cores),
            show_seconds(sizing.step_seconds),
            show_seconds(sizing.receive_seconds),
            size(sizing.memory_bytes),
            f"no: {', '.join(sizing.short_of)}" if sizing.short_of else "yes",
        )
    return table


def verdict(name: str, sizings: Sequence[Sizing], enough: Sizing | None) -> str:
    """Return the number of nodes that a model needs, as a sentence."""
    if enough is not None:
        return f"{name}: {counted(enough.nodes, 'shadow node')} needed"
    last = sizings[-1]
    return (
        f"{name}: not even {last.nodes} nodes, the maximum of a DP group, suffice "
        f"({', '.join(last.short_of)}); use more cores or NICs per node, or more DP groups"
    )
