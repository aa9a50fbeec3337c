"""A script that goes on with the replicas of its model that are there.

Usage: python -m tests.scripts.fewer_replicas KIND FOLDER ITERATIONS SECONDS [keep]

Kinds: `ddp`, and `hsdp` with two shards. Each rank notes its iterations' losses, its number among all, and
what belongs to it alone. A process of rank N of the whole job waits as it starts while the folder has a file
`away-N`: its host is away.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checkmate


def initial_model() -> nn.Sequential:
    """Return the model, as it is before training."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


def sharded(layers: nn.Sequential) -> nn.Module:
    """Shard a model in two, in each of the replicas that are there."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = checkmate.job_mesh("cpu")
    fully_shard(layers, mesh=mesh["dp_replicate", "dp_shard"])
    return layers


def main() -> None:
    """Train with recovery in place."""
    kind, folder, iterations, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    own = int(os.environ["RANK"])
    while (folder / f"away-{own}").exists():
        time.sleep(0.1)
    layers = initial_model()
    shared_optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    torch.manual_seed(own + 1)

    def train() -> None:
        model: nn.Module
        if kind == "ddp":
            model, optimizer = DistributedDataParallel(layers), shared_optimizer
        else:
            model = sharded(initial_model())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        begin, extra = checkmate.restore(model, optimizer)
        extra = extra or f"rank {own}"
        with checkmate.protect(model, optimizer, extra=lambda: extra) as protection:
            for iteration in protection.steps(range(begin, iterations)):
                loss = model(torch.randn(16, 32)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                line = {
                    "iteration": iteration,
                    "loss": float(loss.detach()).hex(),
                    "rank": dist.get_rank(),
                    "world": dist.get_world_size(),
                    "begin": begin,
                    "extra": extra,
                    "time": time.time(),
                    "pid": os.getpid(),
                }
                with (folder / f"rank{own}.jsonl").open("a") as log:
                    print(json.dumps(line), file=log, flush=True)
                time.sleep(seconds)

    checkmate.resilient(train, keep=sys.argv[5:] == ["keep"])


if __name__ == "__main__":
    main()
