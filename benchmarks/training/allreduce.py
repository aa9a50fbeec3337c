"""The ring AllReduce (fp32, 2 channels, untagged) against gloo's, in turns on the same links.

The ring averages. Gloo only sums, which is less work.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped, ratios
from benchmarks.switch.rings import bridge_instead
from benchmarks.training.allreduce_rank import MAINS
from topologies.crew import Crew
from topologies.describe.topology import load
from topologies.lab import Lab

TITLE = "AllReduce of 4 ranks over a kernel bridge, untagged: the ring's time / gloo's, pair by pair"
SIZES = (1, 8, 25, 100)
"""MiB."""
ROUNDS = 15
_AIMED_AT = (8, 25)
_SECONDS = 300.0


def measure() -> list[Result]:
    """Measure in one run; the slowest rank's time counts."""
    if os.geteuid() != 0:
        return [Skipped("allreduce", "needs root, for network namespaces")]
    with Progress(transient=True) as bar, Lab(load("single_tor"), "softswitch", name="benchreduce") as lab:
        task = bar.add_task("allreduce", total=None)
        kib = [1024 * mib for mib in SIZES]
        outputs = rank_outputs(lab, kib, ROUNDS, (), _SECONDS, lambda: bar.advance(task))
    return figures(outputs)


def rank_outputs(
    lab: Lab,
    kib: Sequence[int],
    rounds: int,
    options: Sequence[str],
    seconds: float,
    look: Callable[[], None],
) -> list[dict[str, Any]]:
    """Return what each rank of `allreduce_rank` prints in a lab whose switch is replaced by a bridge.

    Args:
        lab: The lab, whose only switch is removed.
        kib: Sizes of the tensor.
        rounds: Repetitions for each size and kind.
        options: Further ones of the ranks.
        seconds: Until all must have ended.
        look: Called meanwhile.
    """
    bridge_instead(lab)
    hosts = [(rank.name, rank.interface) for rank in lab.topology.ranks]
    common = ["--ips", *(str(nic.ip) for _, nic in hosts), "--kib", *map(str, kib), "--rounds", str(rounds)]
    with Crew(lab) as crew:
        members = []
        for number, (name, nic) in enumerate(hosts):
            place = ["--rank", str(number), "--interface", nic.name]
            argv = [sys.executable, "-m", "benchmarks.training.allreduce_rank", *place, *common, *options]
            members.append(crew.start(name, name, argv))
        crew.finish(members, seconds, look)
        return [json.loads(member.output_text()) for member in members]


def slowest(outputs: Sequence[dict[str, Any]], kib: int, main: str) -> dict[str, list[float]]:
    """Return by implementation the seconds of each round on its slowest rank."""
    of_ranks = [output["seconds"][str(kib)][main] for output in outputs]
    return {
        name: [max(round_) for round_ in zip(*(seconds[name] for seconds in of_ranks), strict=True)]
        for name in of_ranks[0]
    }


def figures(outputs: list[dict[str, Any]]) -> list[Result]:
    """Return the figures from the output of each rank."""
    algorithm = outputs[0]["congestion_control"]
    results: list[Result] = []
    for main in MAINS:
        for mib in SIZES:
            seconds = slowest(outputs, 1024 * mib, main)
            aim, floor = (0.8, 1.0) if mib in _AIMED_AT else (None, None)
            words = "idle" if main == "idle" else "busy in Python"
            name = f"ring / gloo, {mib} MiB, main thread {words}"
            medians = [
                sorted(seconds[implementation])[ROUNDS // 2] * 1000 for implementation in ("ring", "gloo")
            ]
            note = f"{medians[0]:.1f} / {medians[1]:.1f} ms, {algorithm}"
            pairs = ratios(seconds["ring"], seconds["gloo"])
            results.append(Figure(name, pairs, "", aim, floor, smaller=True, note=note))
    return results
