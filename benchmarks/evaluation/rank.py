"""One rank of an evaluated job. It appends each iteration to `steps{r}.jsonl`, and what it has used."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

import checkmate
from benchmarks.comparators.system import Place
from benchmarks.evaluation.systems import system_of
from benchmarks.evaluation.workloads import Workload, make
from testbed.process_memory import peak_resident

_NIC = "data0"


@dataclass(frozen=True)
class Used:
    """What this process has used since its start: `peak` resident bytes, bytes written to disk, and sent."""

    peak: int
    written: int
    sent: int


def main() -> None:
    """Restore, and train to the end."""
    options = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workload = make(options.workload)
    # Labs replace both unless Checkmate is evaluated.
    first, _ = checkmate.restore(workload.ddp, workload.optimizer)
    with (
        checkmate.protect(workload.ddp, workload.optimizer) as protection,
        Path(options.out, f"steps{rank}.jsonl").open("a") as log,
    ):
        system = system_of(options.system, Place(options.disk, options.memory / str(rank), options.interval))
        system.attach(workload.ddp, workload.optimizer)
        first = max(first, system.recover())
        _say(log, resumed=first)
        for iteration in range(first, options.iterations):
            _train(workload, iteration, rank, log)
            system.after_step(iteration)
            protection.mark()
        _say(log, interval=system.interval)
        system.close()
    dist.destroy_process_group()


def _train(workload: Workload, iteration: int, rank: int, log: TextIO) -> None:
    began = time.monotonic()
    loss = workload.step(iteration, rank)
    _say(log, iteration=iteration, loss=loss, began=began, used=asdict(used()))


def _say(log: TextIO, **said: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **said}), file=log, flush=True)


def used() -> Used:
    """Return what this process has used."""
    written = next(
        int(line.split()[1])
        for line in Path("/proc/self/io").read_text().splitlines()
        if line.startswith("write_bytes:")
    )
    sent = next(
        int(line.split()[9])
        for line in Path("/proc/self/net/dev").read_text().splitlines()
        if line.split()[0] == f"{_NIC}:"
    )
    return Used(peak_resident(), written, sent)


def parse() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--workload", required=True)
    made.add_argument("--system", required=True)
    made.add_argument("--interval", type=int, required=True)
    made.add_argument("--iterations", type=int, required=True)
    made.add_argument("--disk", type=Path, required=True)
    made.add_argument("--memory", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True)
    return made.parse_args()


if __name__ == "__main__":
    main()
