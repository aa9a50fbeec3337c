"""AllReduces over trees, the ring and gloo (fp32, untagged), in turns, on the links of a kernel bridge."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any, Final

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped, ratios, spread95
from benchmarks.training.allreduce import rank_outputs, slowest
from benchmarks.training.allreduce_rank import CONTROL
from topologies.describe.topology import build
from topologies.lab import Lab

TITLE: Final = (
    "AllReduce over a kernel bridge, untagged, 1 channel: the trees' time / the ring's, pair by pair"
)
RANKS: Final = (4, 8, 16)
SIZES: Final = (4, 16, 64, 256, 1024, 4096, 25 * 1024)
"""KiB."""
ROUNDS: Final = 15
PAIRS: Final = (
    ("trees, tagged / untagged", "tagged tree", "tree"),
    ("ring, tagged / untagged", "tagged ring", "ring"),
    ("control, ring / ring", CONTROL, "ring"),
)
"""What is compared besides, and with what."""
_SECONDS: Final = 600.0


def measure() -> list[Result]:
    """Measure in one run; the slowest rank's time counts."""
    if os.geteuid() != 0:
        return [Skipped("trees", "needs root, for network namespaces")]
    results: list[Result] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("trees", total=None)
        for ranks in RANKS:
            results += figures(ranks, _outputs(ranks, lambda: bar.advance(task)))
    return results


def _outputs(ranks: int, look: Callable[[], None]) -> list[dict[str, Any]]:
    described = {
        "title": f"{ranks} ranks on a switch",
        "switches": ["tor"],
        "dp_groups": [{"ranks": ["tor"] * ranks}],
        "shadow_nodes": [["tor"]],
    }
    options = ["--channels", "1", "--trees", "--tagged", "--mains", "idle"]
    with Lab(build("trees", described), "softswitch", name="benchtrees") as lab:
        return rank_outputs(lab, SIZES, ROUNDS, options, _SECONDS, look)


def figures(ranks: int, outputs: list[dict[str, Any]]) -> list[Result]:
    """Return the figures from the output of each rank."""
    results: list[Result] = []
    for kib in SIZES:
        seconds = slowest(outputs, kib, "idle")
        size = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
        ms = {name: 1000 * median(times) for name, times in seconds.items()}
        note = f"{ms['tree']:.2f} / {ms['ring']:.2f} ms; gloo {ms['gloo']:.2f} ms"
        pairs = ratios(seconds["tree"], seconds["ring"])
        results.append(
            Figure(
                f"{ranks} ranks, {size}: trees / ring",
                pairs,
                "",
                smaller=True,
                note=f"{note}; {spread95(pairs)}",
            )
        )
        for name, first, second in PAIRS:
            pairs = ratios(seconds[first], seconds[second])
            figure = Figure(f"{ranks} ranks, {size}: {name}", pairs, "", note=spread95(pairs))
            results.append(figure)
    return results
