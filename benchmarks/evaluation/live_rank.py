"""One rank of an evaluated job whose ranks come and go."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed's, where mypy finds it

import checkmate
from benchmarks.comparators import packages
from benchmarks.evaluation.rank_log import RankLog, parse
from benchmarks.evaluation.workloads import make
from checkmate.training.start.membership import named_job

_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05


def main() -> None:
    """Train to the end."""
    packages.use()
    from benchmarks.comparators.live import LiveRecovery, Meeting  # noqa: PLC0415 - it may be missing

    options = parse()
    rank = int(os.environ["RANK"])
    ranks = [one for group in named_job().dp_groups for one in group.ranks]
    place = next(one for one in ranks if one.rank == rank)
    # The group of what torchrun started together. torchft has groups of its own.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    live = LiveRecovery(rank, Meeting(options.lighthouse, str(place.mgmt), str(place.ip)))
    workload = make(options.workload, live.parallel)
    # Labs replace it. They learn here that the rank is ready.
    with checkmate.protect(workload.ddp, workload.optimizer), RankLog(options.out, rank) as log:
        workload = replace(workload, optimizer=live.attach(workload.ddp, workload.optimizer))
        log.say(resumed=live.recover())
        _await_all(options.out, len(ranks))
        while (iteration := live.recover()) < options.iterations:
            said = log.train(workload, iteration)
            done = (
                live.recover()
            )  # a rank that has come back was not in that iteration, but is in this one now
            if done > iteration:
                log.say(**said | {"iteration": done - 1, "share": live.taking_part() / len(ranks)})
        log.say(interval=0)
        live.close()
    dist.destroy_process_group()


def _await_all(folder: Path, ranks: int) -> None:
    """Wait until all ranks are there once, so that they begin together, as those of one torchrun do."""
    deadline = time.monotonic() + _SECONDS
    while len(list(folder.glob("steps*.jsonl"))) < ranks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks have started within {_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
