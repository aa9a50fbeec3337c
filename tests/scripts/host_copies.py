"""A script of DDP whose job has copies by hosts: several buckets, clipping, a scheduler, state of its own.

Usage: python -m tests.scripts.host_copies FOLDER ITERATIONS SECONDS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checkmate

PAUSED_AT = 5
"""An iteration after which all ranks wait as long as their folder has a file `pause`."""


def batch(iteration: int, rank: int) -> torch.Tensor:
    """Return a rank's batch of an iteration."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.randn(8, 64, generator=generator)


def main() -> None:
    """Train, and note each iteration's loss to the bit."""
    folder, iterations, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.BatchNorm1d(128), nn.Linear(128, 16))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    torch.manual_seed(rank + 1)
    begin, seen = checkmate.restore(ddp, optimizer, scheduler=scheduler)
    count = seen or 0
    with (
        checkmate.protect(ddp, optimizer, scheduler=scheduler, extra=lambda: count) as protection,
        (folder / f"rank{rank}.jsonl").open("a") as log,
    ):
        for iteration in range(begin, iterations):
            loss = ddp(batch(iteration, rank)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            count += 1
            line = {"iteration": iteration, "loss": loss.item().hex(), "count": count, "begin": begin}
            print(json.dumps(line), file=log, flush=True)
            protection.mark()
            time.sleep(seconds)
            while iteration == PAUSED_AT and (folder / "pause").exists():
                time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
