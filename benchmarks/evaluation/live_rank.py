"""One rank of an evaluated job whose ranks come and go."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore  # torch.distributed's, where mypy finds it

import checkmate
from benchmarks.comparators import packages
from benchmarks.evaluation.rank_log import RankLog, parse
from benchmarks.evaluation.turns import Turns, train
from benchmarks.evaluation.workloads import Workload, build, plain_ddp
from checkmate.training.start.named_job import named_job

packages.use()

from benchmarks.comparators.live import LiveRecovery, Meeting  # noqa: E402

_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05


def main() -> None:
    """Train to the end."""
    options = parse()
    rank = int(os.environ["RANK"])
    ranks = [host for group in named_job().dp_groups for host in group.ranks]
    place = next(host for host in ranks if host.rank == rank)
    # torchft has groups of its own. This one is for the twin with which it takes turns, or for nothing.
    if options.timed:
        store = FileStore(str(options.out / "group"), len(ranks))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ranks))
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    live = LiveRecovery(rank, Meeting(options.lighthouse, str(place.mgmt), str(place.ip)))
    workload = build(options.workload).parallel(live.parallel)
    # Labs replace it. They learn here that the rank is ready.
    with checkmate.protect(workload.ddp, workload.optimizer), RankLog(options.out, rank) as log:
        workload = replace(workload, optimizer=live.attach(workload.ddp, workload.optimizer))
        log.say(resumed=live.recover())
        _await_all(options.out, len(ranks))
        if options.timed:
            turns = Turns(
                workload, lambda _: None, lambda: None, lambda: build(options.workload).parallel(plain_ddp)
            )
            train(turns, log, warm_up=options.warm_up, plain_first=options.plain_first)
        else:
            _train(live, workload, log, options.iterations, len(ranks))
        live.close()
    dist.destroy_process_group()


def _train(live: LiveRecovery, workload: Workload, log: RankLog, iterations: int, ranks: int) -> None:
    """Train to the end, whoever takes part. A rank that comes back trains once for nothing."""
    while (iteration := live.recover()) < iterations:
        line = log.train(workload, iteration)
        next_iteration = live.recover()
        if next_iteration > iteration:
            log.say(**line | {"iteration": next_iteration - 1, "share": live.taking_part() / ranks})


def _await_all(folder: Path, ranks: int) -> None:
    """Wait until all ranks are there once, so that they begin together, as those of one torchrun do."""
    deadline = time.monotonic() + _SECONDS
    while len(list(folder.glob("steps*.jsonl"))) < ranks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks have started within {_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
