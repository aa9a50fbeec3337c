"""The paper's two figures of the cost model, for the user's own numbers.

Readable in black and white: lines differ in style and marker, not only in colour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from checkmate.base.wording import counted
from checkmate.planner.cost.model import (
    TrainingRun,
    best_every_iterations,
    checkmate_waste,
    conventional_waste,
    saved_gpu_hours,
)
from checkmate.planner.pictures import STYLE, save
from checkmate.planner.units import DAY_HOURS, HOUR_S, show_seconds

LINES: Final = (("-", "o", "0.0"), ("--", "s", "C0"), (":", "^", "C3"))
"""Style, marker and colour of a line."""
FEWER_FAILURES: Final = 20
"""The paper compares the observed rate with about a twentieth of it."""
STALLS_S: Final = (0.01, 2.0)
"""Range of stalls; the paper begins at 10 ms."""


def write_figures(
    file: Path, training: TrainingRun, stall_s: float, every_iterations: int | None, slowdown: float = 0.0
) -> None:
    """Write both figures to one PNG or SVG file, atomically. Raise `OSError` if that fails."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 7.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(1.1, 1))
        draw_waste(figure.add_subplot(grid[0, :]), training, stall_s, every_iterations, slowdown)
        fewer = figure.add_subplot(grid[1, 0])
        now = figure.add_subplot(grid[1, 1], sharey=fewer)
        rate = training.failures_per_gpu_hour
        savings = [
            draw_savings(fewer, training, rate / FEWER_FAILURES, stall_s, slowdown),
            draw_savings(now, training, rate, stall_s, slowdown),
        ]
        now.set_ylabel("")
        _scale([fewer, now], savings)
        save(figure, file)


def draw_waste(
    axes: Axes, training: TrainingRun, stall_s: float, every_iterations: int | None, slowdown: float = 0.0
) -> None:
    """Draw wasted GPU-hours over the checkpoint interval, with its optimum (the paper's first figure)."""
    best = best_every_iterations(training, stall_s)
    last = np.log2(min(training.iterations, max(64, 16 * best, 2 * (every_iterations or 1))))
    _draw_conventional(
        axes, training, stall_s, 2 ** np.linspace(0, np.ceil(last), 40 * int(np.ceil(last)) + 1)
    )
    _mark(axes, training, stall_s, best, "best", marker="*", markersize=13)
    if every_iterations is not None:
        _mark(axes, training, stall_s, every_iterations, "yours", marker="D", markersize=8, fillstyle="none")
    checkmate_hours = checkmate_waste(training, slowdown).gpu_hours
    label = f"Checkmate, each iteration: {checkmate_hours:,.0f} GPU-hours"
    axes.axhline(checkmate_hours, linestyle="-.", color="C2", linewidth=2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    top = axes.dataLim.ymax
    bottom = min(checkmate_hours, conventional_waste(training, stall_s, best).gpu_hours)
    axes.set_ylim(bottom=bottom / 2, top=top * (top / bottom) ** 0.3)  # room for the legend
    _plain(axes.xaxis.set_major_formatter)
    _plain(axes.yaxis.set_major_formatter)
    axes.set(
        xlabel=f"iterations of {show_seconds(training.iteration_s)} between checkpoints",
        ylabel="wasted GPU-hours over the run",
        title=f"{counted(training.gpus, 'GPU')} for {show_seconds(training.duration_hours * HOUR_S)}, "
        f"{training.failures:,.0f} failures expected, {show_seconds(stall_s)} per checkpoint",
    )
    axes.legend(loc="upper center", ncols=2)


def _draw_conventional(axes: Axes, training: TrainingRun, stall_s: float, every: NDArray[np.float64]) -> None:
    wastes = [conventional_waste(training, stall_s, waste) for waste in every]
    total = [waste.gpu_hours for waste in wastes]
    axes.plot(every, total, "-o", color="0.0", markersize=4, markevery=40, label="conventional: sum of both")
    repeated = [waste.repeated_gpu_hours for waste in wastes]
    axes.plot(every, repeated, "--", color="C3", label="repeated after failures")
    if stall_s:
        stalled = [waste.stalled_gpu_hours for waste in wastes]
        axes.plot(every, stalled, ":", color="C0", label="stalled by checkpoints")


def _mark(axes: Axes, training: TrainingRun, stall_s: float, every: int, name: str, **style: Any) -> None:
    """Mark a point of the conventional curve, with its figures in the legend."""
    gpu_hours = conventional_waste(training, stall_s, every).gpu_hours
    interval = show_seconds(every * training.iteration_s)
    label = f"{name}, every {every:,} ({interval}): {gpu_hours:,.0f} GPU-hours"
    axes.plot(every, gpu_hours, linestyle="none", color="0.0", label=label, **style)


def draw_savings(
    axes: Axes, training: TrainingRun, failures_per_gpu_hour: float, stall_s: float, slowdown: float = 0.0
) -> bool:
    """Draw GPU-hours saved per day over the stall, a line per size of cluster (the paper's last figure).

    Return whether there are any.
    """
    saves = False
    stalls = np.geomspace(min(STALLS_S[0], stall_s or 1), max(STALLS_S[1], stall_s), 9)
    sizes = sorted({max(1, training.gpus // by) for by in (1, 2, 4)}, reverse=True)
    for gpus, (style, marker, color) in zip(sizes, LINES, strict=False):
        training_day = TrainingRun(gpus, failures_per_gpu_hour, DAY_HOURS, training.iteration_s)
        saved_hours = [saved_gpu_hours(training_day, stall, slowdown) for stall in stalls]
        saves |= max(saved_hours) > 0
        positive = [
            hours if hours > 0 else np.nan for hours in saved_hours
        ]  # on the scale; others save nothing
        axes.plot(
            stalls, positive, style, marker=marker, color=color, markersize=4, label=counted(gpus, "GPU")
        )
    if stall_s:
        axes.axvline(stall_s, color="0.5", linewidth=1)
        axes.annotate(
            f"{show_seconds(stall_s)}", (stall_s, 0.02), xycoords=("data", "axes fraction"),
            xytext=(-3, 0), textcoords="offset points", ha="right", color="0.3",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(stalls[0] / 1.3, stalls[-1] * 1.3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _plain(axes.yaxis.set_major_formatter)
    axes.set(
        xlabel="stall of a conventional checkpoint",
        ylabel="GPU-hours that Checkmate saves per day",
        title=f"{_power(failures_per_gpu_hour)} failures per GPU-hour",
    )
    axes.legend(loc="upper left")
    return saves


def _scale(panels: Sequence[Axes], savings: Sequence[bool]) -> None:
    """Scale panels that share an axis, and name those without savings."""
    for axes, saves in zip(panels, savings, strict=True):
        if not saves:
            axes.text(0.5, 0.5, "Checkmate saves nothing", transform=axes.transAxes, ha="center", color="0.3")
    if any(savings):
        panels[0].set_yscale("log")
    else:
        panels[0].set_ylim(0, 1)


def _plain(set_formatter: Callable[[FuncFormatter], None]) -> None:
    """Format numbers with separators instead of powers."""
    set_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))


def _power(value: float) -> str:
    """Format a value like 2.0·10⁻⁵."""
    digits, exponent = f"{value:.1e}".split("e")
    return rf"${digits}\cdot10^{{{int(exponent)}}}$"
