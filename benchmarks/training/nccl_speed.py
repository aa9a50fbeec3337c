"""The NCCL plugin's speed between two ranks, against plain sockets, and the processor time of tags, in turns.

A caller drives the plugin as NCCL does in an AllReduce: sends of up to 1 MiB, four in flight on each channel.
Rank 1 of two tags half of what it sends. Plain sockets send as many bytes, in writes of 128 KiB as in iperf3.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped, ratios, spread95
from benchmarks.switch.rings import bridge_instead, quiet_warmup
from benchmarks.training.nccl_speed_rank import CONNECTIONS, MODES, NBYTES
from topologies.crew import Crew
from topologies.describe.topology import load
from topologies.lab import Lab

TITLE = "NCCL plugin: 256 MiB from rank to rank over a kernel bridge, driven as NCCL does, in turns"
ROUNDS = 60
_SECONDS = 900.0


def measure() -> list[Result]:
    """Measure in one run."""
    if os.geteuid() != 0:
        return [Skipped("nccl_speed", "needs root, for network namespaces")]
    quiet_warmup()
    with Progress(transient=True) as bar, Lab(load("single_tor"), "softswitch", name="benchnccl") as lab:
        task = bar.add_task("nccl_speed", total=None)
        bridge_instead(lab)
        with Crew(lab) as crew:
            hosts = [(rank.name, rank.interface) for rank in lab.topology.ranks[:2]]
            common = ["--ips", *(str(nic.ip) for _, nic in hosts), "--rounds", str(ROUNDS)]
            members = []
            for number, (name, nic) in enumerate(hosts):
                options = ["--rank", str(number), "--interface", nic.name]
                argv = [sys.executable, "-m", "benchmarks.training.nccl_speed_rank", *options, *common]
                members.append(crew.start(name, name, argv))
            crew.finish(members, _SECONDS, lambda: bar.advance(task))
            output = json.loads(members[1].output_text())
    return figures(output)


def figures(turns: list[dict[str, Any]]) -> list[Result]:
    """Return the figures from all turns."""
    results: list[Result] = []
    for count in CONNECTIONS:
        words = f"{count} connection" + "s" * (count > 1)
        turns_by_mode = {
            mode: [turn for turn in turns if (turn["mode"], turn["count"]) == (mode, count)] for mode in MODES
        }
        rates = {
            mode: [NBYTES * 8e-9 / turn["seconds"] for turn in mode_turns]
            for mode, mode_turns in turns_by_mode.items()
        }
        processor_times = {
            mode: [turn["used"] for turn in mode_turns] for mode, mode_turns in turns_by_mode.items()
        }
        for mode in ("untagged", "tagged"):
            pairs = ratios(rates[mode], rates["sockets"])
            aim, floor = (0.95, 0.85)
            name = f"plugin, {mode} / plain sockets, throughput, {words}"
            results.append(Figure(name, pairs, "", aim, floor, note=spread95(pairs)))
        name = f"untagged, processor time of both ranks, {words}"
        pairs = ratios(processor_times["tagged"], processor_times["untagged"])
        results.append(Figure(f"tagged / {name}", pairs, "", 1.01, 1.03, smaller=True, note=spread95(pairs)))
        pairs = ratios(processor_times["control"], processor_times["untagged"])
        results.append(Figure(f"control: untagged / {name}", pairs, "", note=spread95(pairs)))
        results += [Figure(f"{mode}, {words}", tuple(rates[mode]), "Gbit/s") for mode in MODES]
        gigabytes = NBYTES / 1e9
        results += [
            Figure(
                f"{mode}, processor time, {words}",
                tuple(seconds / gigabytes for seconds in processor_times[mode]),
                "s/GB",
            )
            for mode in MODES
        ]
    return results
