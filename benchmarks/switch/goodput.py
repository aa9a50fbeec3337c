"""Goodput of a ring AllGather through each target: the same lab, the same traffic, tagged and untagged."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import defaultdict

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped, ratios
from benchmarks.switch.rings import bridge_instead, controlled_lab, gather, quiet_warmup
from topologies.crew import Crew
from topologies.describe.topology import load
from topologies.lab import Lab

TITLE = "Goodput: ring AllGather of 4 ranks, 2 channels, 2 shadow ids (single_tor), each rank's sending rate"
ROUNDS = 3
BYTES, ITERATIONS = 150_000_000, 3
BMV2_SHARE = 15
"""BMv2 gets 1/15 of the bytes; otherwise it would take minutes."""


def measure() -> list[Result]:
    """Return every figure of this module; the runs of a round are consecutive."""
    if os.geteuid() != 0:
        return [Skipped("goodput", "needs root, for network namespaces")]
    quiet_warmup()
    goodputs: dict[str, list[float]] = defaultdict(list)
    with_bmv2 = shutil.which("simple_switch_grpc") is not None
    with contextlib.ExitStack() as stack, Progress(transient=True) as bar:
        task = bar.add_task("goodput", total=ROUNDS * (5 if with_bmv2 else 3))
        crews = {}
        for target in ("softswitch", "bmv2") if with_bmv2 else ("softswitch",):
            lab = stack.enter_context(Lab(load("single_tor"), target, name=f"bench{target[:4]}"))
            crews[target] = stack.enter_context(controlled_lab(lab))
        plain = stack.enter_context(Lab(load("single_tor"), "softswitch", name="benchbridge"))
        bridge_instead(plain)
        crews["bridge"] = Crew(plain)
        for _ in range(ROUNDS):
            for target, crew in crews.items():
                share = BMV2_SHARE if target == "bmv2" else 1
                for mode in ("untagged",) if target == "bridge" else ("untagged", "tagged"):
                    run = gather(crew, BYTES // share, ITERATIONS, tagged=mode == "tagged")
                    goodputs[f"{target}, {mode}"].append(run.goodput())
                    bar.advance(task)
    return _figures(goodputs, with_bmv2)


def _figures(goodputs: dict[str, list[float]], with_bmv2: bool) -> list[Result]:
    soft = {mode: goodputs[f"softswitch, {mode}"] for mode in ("untagged", "tagged")}
    results: list[Result] = []
    if with_bmv2:
        for mode in ("tagged", "untagged"):
            ratio = ratios(soft[mode], goodputs[f"bmv2, {mode}"])
            results.append(
                Figure(f"softswitch / BMv2, {mode}", ratio, "", 10, 5, note="BMv2 with 1/15 of the bytes")
            )
    else:
        results.append(Skipped("BMv2 beside it", "simple_switch_grpc is not on PATH"))
    results.append(Figure("softswitch, tagged / untagged", ratios(soft["tagged"], soft["untagged"]), ""))
    bridge = goodputs["bridge, untagged"]
    results.append(Figure("softswitch / kernel bridge, untagged", ratios(soft["untagged"], bridge), ""))
    results += [Figure(name, tuple(values), "Gbit/s") for name, values in goodputs.items()]
    return results
