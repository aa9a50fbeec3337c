"""One rank of an evaluated job, which resumes from a checkpoint."""

from __future__ import annotations

import argparse

import torch.distributed as dist

import checkmate
from benchmarks.comparators.system import CheckpointFolders
from benchmarks.evaluation.rank_log import RankLog, parse
from benchmarks.evaluation.systems import reduce_of, system_of
from benchmarks.evaluation.turns import Turns, train
from benchmarks.evaluation.workloads import Workload, build, plain_ddp


def main() -> None:
    """Train to the end, again after each failure of another rank if it recovers in place."""
    options = parse()
    if options.in_place:
        model = build(options.workload)
        checkmate.resilient(lambda: _train(options, model.parallel(plain_ddp)), backend="gloo")
        return
    dist.init_process_group("gloo")
    _train(options, build(options.workload).parallel(plain_ddp))
    dist.destroy_process_group()


def _train(options: argparse.Namespace, workload: Workload) -> None:
    """Restore, and train to the end."""
    rank = dist.get_rank()
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
            twin = None if switchable else lambda: build(options.workload).parallel(plain_ddp)
            turns = Turns(workload, after, system.finish, twin)
            train(turns, log, warm_up=options.warm_up, plain_first=options.plain_first)
        else:
            for iteration in range(first, options.iterations):
                log.say(**log.train(workload, iteration))
                after(iteration)
        log.say(interval=system.interval)
        system.close()


if __name__ == "__main__":
    main()
