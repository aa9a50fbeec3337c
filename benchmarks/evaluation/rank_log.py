"""Options and the log `steps{r}.jsonl` of both kinds of ranks of an evaluated job."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.evaluation.workloads import Workload
from testbed.process_memory import peak_resident

_NICS = ("data0:", "mgmt0:")
"""The network of gradients, and that of everything else."""


@dataclass(frozen=True)
class ResourceUse:
    """Resource use of a process since its start: `peak` resident bytes, bytes written to disk, and sent."""

    peak: int
    written_bytes: int
    sent_bytes: int


class RankLog:
    """A rank's log, as a context manager."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._file = (folder / f"steps{rank}.jsonl").open("a")
        print(file=self._file)  # a rank that was killed may have left half a line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def train(self, workload: Workload, iteration: int) -> dict[str, Any]:
        """Train an iteration; return what is to be said of it."""
        began = time.monotonic()
        loss = workload.step(iteration, self._rank)
        return {"iteration": iteration, "loss": loss, "began": began}

    def say(self, **fields: Any) -> None:
        """Append a line, with the time."""
        print(json.dumps({"at": time.monotonic(), **fields}), file=self._file, flush=True)


def resource_use() -> ResourceUse:
    """Return the resources that this process has used."""
    written_bytes = next(
        int(line.split()[1])
        for line in Path("/proc/self/io").read_text().splitlines()
        if line.startswith("write_bytes:")
    )
    sent_bytes = sum(
        int(line.split()[9])
        for line in Path("/proc/self/net/dev").read_text().splitlines()
        if line.split()[0] in _NICS
    )
    return ResourceUse(peak_resident(), written_bytes, sent_bytes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A rank of an evaluated job")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--system", required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--memory", type=Path, required=True)
    parser.add_argument("--timed", action="store_true", help="train a block with the system, and one without")
    parser.add_argument("--plain-first", action="store_true", help="in the opposite order")
    parser.add_argument("--warm-up", type=int, default=0, help="iterations that are not timed")
    parser.add_argument("--lighthouse", default="", help="the URL of torchft's")
    parser.add_argument("--in-place", action="store_true", help="keep the process when another rank dies")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()
