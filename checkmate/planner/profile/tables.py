"""The result of `checkmate profile` as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from checkmate.planner.profile.sizing import Sizing
from checkmate.planner.scaling import Profile, StepTimes, outliers
from checkmate.planner.units import show_seconds
from checkmate.wording import counted, size


@dataclass(frozen=True)
class ProfileFigure:
    """A measurement with some NICs or threads. `outlier` describes a contradiction to others, if any."""

    what: str
    parts: str
    figure: str
    outlier: str


def figures(found: Profile) -> list[ProfileFigure]:
    """Return all measurements."""
    rates = found.receive_bytes_per_s
    odd = outliers({nics: 1 / rate for nics, rate in rates.items()})
    what = "receiving into buckets, loopback"
    made = [
        ProfileFigure(what, counted(nics, "NIC"), f"{rate * 8e-9:.3g} Gbit/s", odd.get(nics, ""))
        for nics, rate in rates.items()
    ]
    for step in found.steps:
        odd = outliers(step.seconds)
        what = f"{step.optimizer} step of {step.model}"
        for threads, took in step.seconds.items():
            made.append(
                ProfileFigure(what, counted(threads, "thread"), show_seconds(took), odd.get(threads, ""))
            )
    return made


def measured(made: Sequence[ProfileFigure]) -> Table:
    """Return a table of measurements, to be printed without markup because names are the user's."""
    table = Table(title="this machine, measured", title_justify="left")
    table.add_column("what")
    table.add_column("with")
    table.add_column("figure", justify="right")
    odd = any(figure.outlier for figure in made)
    if odd:
        table.add_column("outlier", style="yellow")
    for one in made:
        table.add_row(one.what, one.parts, one.figure, *([one.outlier] if odd else []))
    return table


def predicted(name: str, times: StepTimes, sizings: Sequence[Sizing], iteration_s: float | None) -> Table:
    """Return a table of a model on 1, 2, ... nodes."""
    most = max(times.seconds)
    cores = sizings[0].cores
    beyond = f", from {counted(most, 'core')} to {cores} per node" if cores > most else ""
    title = Text(f"{name}, {times.dtype}, predicted{beyond}", style="table.title")
    made = Table(title=title, title_justify="left")
    for column in ("nodes", "cores", "step", "receiving", "memory"):
        made.add_column(column, justify="right")
    made.add_column("enough memory" if iteration_s is None else f"enough for {show_seconds(iteration_s)}")
    for sizing in sizings:
        made.add_row(
            str(sizing.nodes),
            str(sizing.cores),
            show_seconds(sizing.step_seconds),
            show_seconds(sizing.receive_seconds),
            size(sizing.memory_bytes),
            f"no: {', '.join(sizing.short_of)}" if sizing.short_of else "yes",
        )
    return made


def verdict(name: str, sizings: Sequence[Sizing], enough: Sizing | None) -> str:
    """Return the number of nodes that a model needs, as a sentence."""
    if enough is not None:
        return f"{name}: {counted(enough.nodes, 'shadow node')} needed"
    last = sizings[-1]
    return (
        f"{name}: not even {last.nodes} nodes, the maximum of a DP group, suffice "
        f"({', '.join(last.short_of)}); use more cores or NICs per node, or more DP groups"
    )
