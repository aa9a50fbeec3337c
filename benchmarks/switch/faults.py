"""Faults: 1% loss on training links from the first segment, and a stream beyond 4 GB; all verified."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from benchmarks.figures import Figure, Result, Skipped
from benchmarks.switch.rings import controlled_lab, quiet_warmup
from checkmate.output.consoles import text_console
from topologies.describe.topology import Topology, load
from topologies.lab import Lab
from topologies.progress import StepProgress
from topologies.traffic.orders import Load
from topologies.traffic.run import Traffic, TrafficOutcome

TITLE = "Faults: shadow streams that are complete, by SHA-256 taken at both ends"
LOSS = 0.01
LOSSY_BYTES = 200_000_000
LONG_BYTES = 6_000_000_000
"""Bytes; three quarters of them are in the last rank's stream."""


def measure() -> list[Result]:
    """Return every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("faults", "needs root, for network namespaces")]
    quiet_warmup()
    lossy, by = _run(load("single_tor"), Load(LOSSY_BYTES), loss=LOSS)
    long, _ = _run(_one_stream(), Load(LONG_BYTES, iterations=60))
    longest = max(stream["bytes"] for rank in long.ranks for stream in rank["streams"])
    if longest <= 1 << 32:
        raise RuntimeError(f"the longest stream has only {longest} bytes")
    return [
        Figure(
            "1% loss on training links: complete streams / streams",
            (_complete(lossy),),
            "",
            floor=1,
            note=f"{LOSSY_BYTES / 1e6:.0f} MB, {lossy.retransmitted} segments retransmitted, loss by {by}",
        ),
        Figure(
            "a stream beyond 4 GB: complete streams / streams",
            (_complete(long),),
            "",
            floor=1,
            note=f"{longest:,} bytes",
        ),
    ]


def _run(topology: Topology, traffic_load: Load, loss: float = 0.0) -> tuple[TrafficOutcome, str | None]:
    with (
        Lab(topology, "softswitch", name="benchfaults", loss=loss) as lab,
        controlled_lab(lab) as crew,
        StepProgress(text_console(stderr=True)) as steps,
    ):
        return Traffic(crew, traffic_load, steps).run(), lab.loss_by


def _complete(outcome: TrafficOutcome) -> float:
    if outcome.faults:
        raise RuntimeError(f"the tagger failed: {outcome.faults}")
    rows = outcome.verdict.rows
    return sum(row.equal for row in rows) / len(rows)


def _one_stream() -> Topology:
    """Return a lab with four ranks, one channel, one shard, and so two streams."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "onestream.yaml"
        file.write_text(
            "title: one channel, one shard\nswitches: [tor]\n"
            "dp_groups:\n  - ranks: [tor, tor, tor, tor]\nshadow_nodes:\n  - [tor, tor]\n"
        )
        return load(str(file))
