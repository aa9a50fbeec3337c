"""What both kinds of ranks of an evaluated job share: options, and a log, `steps{r}.jsonl`."""

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
class Used:
    """What this process has used since its start: `peak` resident bytes, bytes written to disk, and sent."""

    peak: int
    written: int
    sent: int


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

    def say(self, **said: Any) -> None:
        """Append a line, with the time."""
        print(json.dumps({"at": time.monotonic(), **said}), file=self._file, flush=True)


def used() -> Used:
    """Return what this process has used."""
    written = next(
        int(line.split()[1])
        for line in Path("/proc/self/io").read_text().splitlines()
        if line.startswith("write_bytes:")
    )
    sent = sum(
        int(line.split()[9])
        for line in Path("/proc/self/net/dev").read_text().splitlines()
        if line.split()[0] in _NICS
    )
    return Used(peak_resident(), written, sent)


def parse() -> argparse.Namespace:
    made = argparse.ArgumentParser(description="A rank of an evaluated job")
    made.add_argument("--workload", required=True)
    made.add_argument("--system", required=True)
    made.add_argument("--interval", type=int, required=True)
    made.add_argument("--iterations", type=int, required=True)
    made.add_argument("--disk", type=Path, required=True)
    made.add_argument("--memory", type=Path, required=True)
    made.add_argument("--timed", action="store_true", help="train a block with the system, and one without")
    made.add_argument("--plain-first", action="store_true", help="in the opposite order")
    made.add_argument("--warm-up", type=int, default=0, help="iterations that are not timed")
    made.add_argument("--lighthouse", default="", help="the URL of torchft's")
    made.add_argument("--out", type=Path, required=True)
    return made.parse_args()
