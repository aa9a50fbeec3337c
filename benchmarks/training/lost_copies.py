"""Lost copies that ranks send again: how far shadow nodes are behind, and what it costs trainers.

A lab's links to shadow nodes lose frames, one in ten iterations of a stream, one in each, and ten. The cost
is measured with twins that take turns in the same processes, without and with `lossless: false`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, Result, Skipped, ratios, spread95
from benchmarks.training import lost_copies_rank, twins
from benchmarks.training.twin_labs import race
from topologies.crew import status
from topologies.describe.topology import Topology, load
from topologies.training.job import JobPlan, start_all, training_lab

TITLE: Final = (
    "Lost copies: a GPT of 5 million parameters on 4 ranks that share one core; 2 shards, 8 streams"
)
ITERATIONS: Final = 150
_FIRST: Final = 10
"""Iterations before those that count: connections open, and DDP rebuilds its buckets."""
HOLES: Final = (0.1, 1.0, 10.0)
"""Lost frames in an iteration of a stream."""
STARTS, TURNS = 2, 60
_SECONDS: Final = 900.0


@dataclass(frozen=True)
class LossyRun:
    """What one run has shown. `packets`: copies of an iteration of a stream."""

    lines: list[dict[str, int]]
    packets: float
    streams: int
    joined_again: int

    @property
    def at_most_one(self) -> float:
        """The share of iterations after which all shards were at most one behind."""
        return sum(line["behind"] <= 1 for line in self.lines) / len(self.lines)

    @property
    def repairs(self) -> float:
        """Repairs in an iteration of a stream."""
        return (self.lines[-1]["repairs"] - self.lines[0]["repairs"]) / len(self.lines) / self.streams


def measure() -> list[Result]:
    """Return every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("lost copies", "needs root, for network namespaces")]
    lab = load("single_tor")
    lossy = replace(lab, lossless=False)
    with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder:
        return list(_results(Path(folder), lab, lossy))


def _results(folder: Path, lab: Topology, lossy: Topology) -> Iterator[Result]:
    whole = _run(folder / "none", lossy, 0.0)
    yield from _behind("no loss", whole)
    for holes in HOLES:
        share = holes / whole.packets
        run = _run(folder / f"{holes:g}", lossy, share)
        yield from _behind(f"{holes:g} frames of a stream's iteration lost ({share:.2%})", run)
    control = _run(folder / "control", lab, HOLES[1] / whole.packets)
    yield from _behind(f"control, without repair: {HOLES[1]:g} frame lost", control)
    kinds = {
        "nothing kept (lossless: true)": (lab, 0.0),
        "kept, and none lost": (lossy, 0.0),
        f"kept, and {HOLES[1]:g} frame lost": (lossy, HOLES[1] / whole.packets),
    }
    for name, (topology, loss) in kinds.items():
        blocks = race(
            folder / f"twins {name}",
            topology,
            "benchmarks.training.twins",
            (),
            STARTS,
            TURNS,
            copy_loss=loss,
        )
        protected, plain, control_blocks = ([block.seconds for block in blocks[kind]] for kind in twins.KINDS)
        time, level = ratios(protected, plain), ratios(control_blocks, plain)
        yield Figure(f"iteration time / untagged ring: {name}", time, "", smaller=True, note=spread95(time))
        yield Figure(f"control of that: {name}", level, "", note=spread95(level))


def _behind(name: str, run: LossyRun) -> Iterator[Result]:
    note = f"{run.repairs:.2f} repairs in an iteration of a stream"
    yield Figure(
        f"{name}: iterations after which all shards were at most one behind",
        (run.at_most_one,),
        "",
        note=note,
    )
    worst = tuple(float(line["behind"]) for line in run.lines)
    yield Figure(f"{name}: iterations behind", worst, "", smaller=True)
    yield Figure(f"{name}: shards seeded again", (float(run.joined_again),), "", smaller=True)


def _run(folder: Path, topology: Topology, loss: float) -> LossyRun:
    plan = JobPlan(("--iterations", str(ITERATIONS)), module="benchmarks.training.lost_copies_rank")
    with training_lab(topology, "softswitch", "bench_lost", plan, folder, copy_loss=loss) as job:
        start_all([job])
        job.finish(_SECONDS)
        streams: list[dict[str, Any]] = [s for switch in status(job.crew) for s in switch["streams"]]
        texts = [member.error_text() for member in job.shadows.values()]
        text = (folder / f"{lost_copies_rank.FILE}.0").read_text()
    lines = [json.loads(line) for line in text.splitlines()][_FIRST:]
    packets = sum(stream["packets"] for stream in streams) / len(streams) / ITERATIONS
    return LossyRun(lines, packets, len(streams), sum(text.count("joins again") for text in texts))
