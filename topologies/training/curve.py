"""A plot of the loss curves of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from topologies.training.record import Recovery

mpl.use("agg")


def draw(
    file: Path, reference: Mapping[int, float], protected: Mapping[int, float], recoveries: Sequence[Recovery]
) -> None:
    """Write a PNG: the protected run's losses as dots on the line of the uninterrupted run."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*_points(reference), color="0.6", linewidth=4, label="uninterrupted")
    axes.plot(
        *_points(protected), "o", color="C0", markersize=3.5, label="protected by Checkmate, a rank killed"
    )
    for recovery in recoveries:
        said = f"rank {recovery.rank}: kill -9 in {recovery.phase}\nresumed after {recovery.seconds:.1f} s"
        axes.axvline(recovery.iteration, color="C3", linewidth=1)
        axes.annotate(
            f"{said}, at iteration {recovery.resumed_with}",
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
