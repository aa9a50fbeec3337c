"""The GPT example, but after every second iteration all state is discarded and restored."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import checkmate
from checkmate.examples.gpt import text
from checkmate.examples.gpt.model import Gpt, Shape
from checkmate.examples.gpt.train import parse, warm_up_then_cosine

TOGETHER = 2


def main() -> None:
    """Train in rounds of two iterations; the first begins like the undisturbed job, the others from noise."""
    options = parse()
    shape = Shape(options.layers, options.width, options.heads, options.context, options.dropout)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = text.read()
    for start in range(0, options.iterations, TOGETHER):
        torch.manual_seed(options.seed + 1000 * start)
        model = Gpt(shape)
        ddp = DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
        scheduler = LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, options.iterations))
        torch.manual_seed(options.seed + 1 + rank + 1000 * start)
        begin, _ = checkmate.restore(ddp, optimizer, scheduler=scheduler)
        if begin != start:
            raise RuntimeError(f"restored to go on with {begin}, not {start}")
        protection = checkmate.protect(ddp, optimizer, scheduler=scheduler)
        with protection, Path(options.out, f"rank{rank}.jsonl").open("a") as log:
            for iteration in range(start, min(start + TOGETHER, options.iterations)):
                loss = ddp(*data.batch(options.batch, options.context))
                loss.backward()
                checkmate.clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                print(json.dumps({"iteration": iteration, "loss": loss.item()}), file=log, flush=True)
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, options.out / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
