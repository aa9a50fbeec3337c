"""One rank of an evaluated job, which resumes from a checkpoint."""

from __future__ import annotations

import torch.distributed as dist

import checkmate
from benchmarks.comparators.system import CheckpointFolders
from benchmarks.evaluation.rank_log import RankLog, parse
from benchmarks.evaluation.systems import reduce_of, system_of
from benchmarks.evaluation.turns import Turns, train
from benchmarks.evaluation.workloads import make, plain_ddp


def main() -> None:
    """Restore, and train to the end."""
    options = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workload = make(options.workload, plain_ddp)
    # Labs replace both unless Checkmate is evaluated.
    first, _ = checkmate.restore(workload.ddp, workload.optimizer)
    with (
        checkmate.protect(workload.ddp, workload.optimizer) as protection,
        RankLog(options.out, rank) as log,
    ):
        system = system_of(
            options.system, CheckpointFolders(options.disk, options.memory / str(rank), options.interval)
        )
        system.attach(workload.ddp, workload.optimizer)
        first = max(first, system.recover())
        log.say(resumed=first)

        def after(iteration: int) -> None:
            system.after_step(iteration)
            protection.mark()

        if options.timed:
            switchable = reduce_of(options.system) == "gloo" and system.switchable
            twin = None if switchable else lambda: make(options.workload, plain_ddp)
            turns = Turns(workload, after, system.finish, twin)
            train(turns, log, warm_up=options.warm_up, plain_first=options.plain_first)
        else:
            for iteration in range(first, options.iterations):
                log.say(**log.train(workload, iteration))
                after(iteration)
        log.say(interval=system.interval)
        system.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
