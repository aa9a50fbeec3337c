"""The paper's scaling figure: time of an optimizer step over cores, with a line for each added shadow node.

(Section "Optimizer Scaling across Multiple Nodes".) Readable in black and white: lines differ in style and
marker, and are labelled at their ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from checkmate.base.wording import counted
from checkmate.planner.models.named import Model
from checkmate.planner.pictures import STYLE, save
from checkmate.planner.profile.sizing import Sizing
from checkmate.planner.scaling import StepTimes, curve
from checkmate.planner.units import show_seconds

STYLES: Final = (
    ("-", "o", "0.0"),
    ("--", "s", "C0"),
    (":", "^", "C3"),
    ("-.", "D", "C2"),
    ((0, (6, 2, 1, 2, 1, 2)), "v", "C4"),
    ((0, (8, 2)), "P", "C5"),
)
"""Style, marker and colour of a line."""
_APART: Final = 0.055
"""Minimum distance between labels, as a share of the axis."""
_MAX_NAMED: Final = 8
"""Maximum number of nodes that have a label."""


def write_figure(
    file: Path,
    lines: Sequence[tuple[Model, StepTimes]],
    cores: int,
    nodes: int,
    iteration_s: float | None,
    enough: Mapping[str, Sizing],
) -> None:
    """Plot the step time on up to `nodes` nodes of `cores` cores each. Raise `OSError` if writing fails.

    `enough`: the smallest number of nodes that suffices, by model; it is marked.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, lines, cores, nodes, enough)
        _labels(axes, lines, cores, nodes, iteration_s)
        _nodes(axes, cores, nodes)
        save(figure, file)


def _draw(
    axes: Axes,
    lines: Sequence[tuple[Model, StepTimes]],
    cores: int,
    nodes: int,
    enough: Mapping[str, Sizing],
) -> None:
    for (style, marker, colour), (model, times) in zip(_styles(len(lines)), lines, strict=True):
        points = curve(times, model, cores, nodes)
        axes.plot(*zip(*points, strict=True), ls=style, color=colour, lw=1.6)
        measured = [(n, took) for n, took in times.seconds.items() if n <= cores]
        axes.plot(
            *zip(*measured, strict=True), ls="", marker=marker, ms=6, color=colour, mfc="white", zorder=3
        )
        if model.name in enough:
            sizing = enough[model.name]
            axes.plot(
                sizing.cores, sizing.step_seconds, ls="", marker="*", ms=11, color=colour, clip_on=False
            )
    handles = [
        Line2D([], [], ls="", marker="o", ms=6, color="0.0", mfc="white", label="measured here"),
        Line2D([], [], color="0.0", lw=1.6, label="predicted"),
    ]
    if enough:
        handles.append(Line2D([], [], ls="", marker="*", ms=11, color="0.0", label="nodes that suffice"))
    axes.legend(
        handles=handles, loc="upper right", ncols=len(handles), bbox_to_anchor=(1, 1.16), borderaxespad=0
    )


def _labels(
    axes: Axes, lines: Sequence[tuple[Model, StepTimes]], cores: int, nodes: int, iteration_s: float | None
) -> None:
    """Label the axes, the right end of each line, and the iteration time."""
    most = cores * nodes
    axes.set_yscale("log")
    axes.set_xlim(0, most)
    ends = [
        (
            curve(times, model, cores, nodes)[-1][1],
            f"{model.name} (by layer)" if times.by_layer else model.name,
            colour,
        )
        for (_, _, colour), (model, times) in zip(_styles(len(lines)), lines, strict=True)
    ]
    if iteration_s is not None:
        axes.axhline(iteration_s, color="0.4", lw=1)
        ends.append((iteration_s, f"iteration, {show_seconds(iteration_s)}", "0.3"))
    axes.set_ymargin(0.12)
    axes.autoscale_view(scalex=False)
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    height = -1.0
    for seconds, label, colour in sorted(ends):
        height = max(height + _APART, float(to_axes((most, seconds))[1]))
        axes.text(1.015, height, label, transform=axes.transAxes, va="center", color=colour)
    axes.set_xlabel("cores, over all shadow nodes")
    axes.set_ylabel("time of an optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 4, 5, 10]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    optimizers = ", ".join(dict.fromkeys(times.optimizer for _, times in lines))
    types = ", ".join(dict.fromkeys(times.dtype for _, times in lines))
    axes.set_title(f"{optimizers}, {types}", loc="left", fontsize=9)


def _nodes(axes: Axes, cores: int, nodes: int) -> None:
    """Draw a dotted line between nodes, and name as many nodes as there is room for."""
    for node in range(1, nodes):
        axes.axvline(node * cores, color="0.3", ls=":", lw=1)
    interval = -(-nodes // _MAX_NAMED)
    for node in range(interval - 1, nodes, interval):
        words = counted(node + 1, "node") if nodes <= _MAX_NAMED else str(node + 1)
        axes.text(
            (node + 0.5) / nodes, 0.975, words, transform=axes.transAxes, ha="center", va="top", color="0.3"
        )


def _styles(count: int) -> list[tuple[object, str, str]]:
    return [STYLES[number % len(STYLES)] for number in range(count)]
