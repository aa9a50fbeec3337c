"""A rank that trains a GPT and, on rank 0, asks after each iteration how far shadow nodes are behind.

The options are those of `checkmate.examples.gpt.train`. Rank 0 writes a line of JSON for each iteration.
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch.distributed as dist

import checkmate
from benchmarks.training.twins import GptTwin
from checkmate.examples.gpt import train
from checkmate.keys.access import access
from checkmate.keys.roles import Role
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.start.named_job import named_job

FILE: Final = "behind.jsonl"
_SECONDS: Final = 5.0


def main() -> None:
    """Train."""
    options = train.parse()
    dist.init_process_group("gloo")
    twin: Any = GptTwin(options)
    checkmate.restore(twin.model, twin.optimizer, scheduler=twin.scheduler)
    job = named_job()
    with (
        Stubs(job, access(job, Role.TRAINER).keys) as stubs,
        (options.out / f"{FILE}.{dist.get_rank()}").open("w") as log,
        checkmate.protect(twin.model, twin.optimizer, scheduler=twin.scheduler) as protection,
    ):
        for iteration in range(options.iterations):
            twin.step()
            protection.mark()
            if dist.get_rank() == 0:
                print(json.dumps(_behind(stubs, iteration)), file=log, flush=True)
    dist.destroy_process_group()


def _behind(stubs: Stubs, iteration: int) -> dict[str, int]:
    """Return by how many iterations the last shard is behind, and the repairs of all."""
    answers = stubs.statuses(timeout=_SECONDS).values()
    holds = [hold for answer in answers if isinstance(answer, pb.NodeStatus) for hold in answer.holds]
    at = min((hold.stepped if hold.live else -1 for hold in holds), default=-1)
    return {
        "behind": iteration - at,
        "repairs": sum(hold.repairs for hold in holds),
        "repair_bytes": sum(hold.repair_bytes for hold in holds),
    }


if __name__ == "__main__":
    main()
