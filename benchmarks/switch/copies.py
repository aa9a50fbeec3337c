"""The paper's network figure, for AllGather and AllReduce: traffic in and out of the switch, with copies.

Offloads are off, so that a frame is a packet. Measured figures are shown with the schedule's predictions:
each of the n chunks crosses n - 1 links in an AllGather and twice as many in an AllReduce, and is tagged and
copied on one of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.progress import track

from benchmarks.figures import Figure, Result, Skipped
from benchmarks.switch.rings import controlled_lab, gather, quiet_warmup
from checkmate.job.files import read_job
from checkmate.wire.schedule import FIRST, LAST, tagged_chunks
from topologies.crew import Crew
from topologies.describe.topology import load
from topologies.lab import Lab
from topologies.traffic.orders import Operation

TITLE = (
    "Copies: ring AllGather and AllReduce of 4 ranks, 1 channel, frames of 1,500 bytes; bandwidth and frames "
    "at the switch"
)
COPIES = (2, 4, 8, 16)
RANKS, BYTES, ITERATIONS = 4, 12_000_000, 4
OPERATIONS: Mapping[Operation, int] = {"allgather": 1, "allreduce": 2}
"""Operations, and how often each sends all chunks around the ring."""


def measure() -> list[Result]:
    """Return every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("copies", "needs root, for network namespaces")]
    quiet_warmup()
    results: list[Result] = []
    for copies in track(COPIES, "copies", transient=True):
        results += _with(copies)
    return results


def _with(copies: int) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"copies{copies}.yaml"
        nodes = "\n".join(["  - [tor]"] * copies)
        file.write_text(
            f"title: {copies} copies\nreplicas: {copies}\nswitches: [tor]\n"
            f"dp_groups:\n  - ranks: [{', '.join(['tor'] * RANKS)}]\nshadow_nodes:\n{nodes}\n"
        )
        topology = load(str(file))
    with (
        Lab(topology, "softswitch", name=f"copies{copies}", offloads=False) as lab,
        controlled_lab(lab) as crew,
    ):
        return [result for operation in OPERATIONS for result in _run(lab, crew, copies, operation)]


def _run(lab: Lab, crew: Crew, copies: int, operation: Operation) -> list[Result]:
    nbytes = BYTES // OPERATIONS[operation]
    plain = gather(crew, nbytes, ITERATIONS, tagged=False, operation=operation)
    before = _ports(lab)
    tagged = gather(crew, nbytes, ITERATIONS, tagged=True, operation=operation)
    after = _ports(lab)
    received_bytes, sent_bytes, frames_in, frames_out = (after[way] - before[way] for way in _WAYS)
    seconds = sum(tagged.seconds)
    predicted = 1 + copies * tagged_share() / OPERATIONS[operation]
    name = f"{operation}, {copies} copies"
    note = f"the schedule predicts {predicted:.3g}"
    frames = f"{frames_out:,} / {frames_in:,}"
    return [
        Figure(
            f"{name}: bytes sent / received from the ranks", (sent_bytes / received_bytes,), "", note=note
        ),
        Figure(f"{name}: frames, ACKs included", (frames_out / frames_in,), "", note=frames),
        Figure(f"{name}: switch receives", (8e-9 * received_bytes / seconds,), "Gbit/s"),
        Figure(f"{name}: switch sends", (8e-9 * sent_bytes / seconds,), "Gbit/s"),
        Figure(f"{name}: ring's rate, tagged / untagged", (tagged.goodput() / plain.goodput(),), ""),
        Figure(f"{name}: ring's rate", (tagged.goodput(),), "Gbit/s"),
    ]


def tagged_share(elements: int = 1_000_000) -> float:
    """Return the share of an AllGather's traffic that is tagged: all chunks once, of n - 1 times."""
    tagged = [chunk for side in (FIRST, LAST) for chunk in tagged_chunks(elements, 1, 0, RANKS, side)]
    return sum(len(chunk.where) for chunk in tagged) / (elements * (RANKS - 1))


_WAYS = ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets")


def _ports(lab: Lab) -> dict[str, int]:
    """Return bytes and frames that the switch received from the ranks, and sent to all.

    ACKs of shadow nodes end in the switch.
    """
    job = read_job(lab.job_file)
    ranks = {f"port{rank.port}" for group in job.dp_groups for rank in group.ranks}
    ports = lab.stats()[job.fabric.switches[0].name]
    return {
        way: sum(
            counters[way]
            for name, counters in ports.items()
            if name in ranks or (name.startswith("port") and way.startswith("tx"))
        )
        for way in _WAYS
    }
