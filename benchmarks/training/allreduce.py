"""The ring AllReduce (fp32, 2 channels, untagged) against gloo's, in turns on the same links.

The ring averages. Gloo only sums, which is less work.
"""

from __future__ import annotations

import json
import os
import sys
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
        bridge_instead(lab)
        with Crew(lab) as crew:
            hosts = [(rank.name, rank.interface) for rank in lab.topology.ranks]
            ips = [str(nic.ip) for _, nic in hosts]
            common = ["--ips", *ips, "--kib", *(str(1024 * mib) for mib in SIZES), "--rounds", str(ROUNDS)]
            members = []
            for number, (name, nic) in enumerate(hosts):
                options = ["--rank", str(number), "--interface", nic.name]
                argv = [sys.executable, "-m", "benchmarks.training.allreduce_rank", *options, *common]
                members.append(crew.start(name, name, argv))
            crew.finish(members, _SECONDS, lambda: bar.advance(task))
            outputs = [json.loads(member.output_text()) for member in members]
    return figures(outputs)


def figures(outputs: list[dict[str, Any]]) -> list[Result]:
    """Return the figures from the output of each rank."""
    algorithm = outputs[0]["congestion_control"]
    results: list[Result] = []
    for main in MAINS:
        for mib in SIZES:
            seconds = {
                implementation: [
                    max(round_)
                    for round_ in zip(
                        *(s["seconds"][str(1024 * mib)][main][implementation] for s in outputs), strict=True
                    )
                ]
                for implementation in ("ring", "gloo")
            }
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
