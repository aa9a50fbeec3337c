"""Train a small GPT with DistributedDataParallel, protected by `checkmate.restore` and `checkmate.protect`.

CHECKMATE_JOB=job.yaml torchrun --nnodes 4 ... --max-restarts 10 -m checkmate.examples.gpt.train
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import checkmate
from checkmate.examples.common import LossLog, add_device, add_in_place, parser, run
from checkmate.examples.gpt import text
from checkmate.examples.gpt.model import Gpt, Shape


def main() -> None:
    """Train, and print the loss of each iteration."""
    options = parse()
    torch.manual_seed(options.seed)  # the same model on all ranks
    model = Gpt(Shape(options.layers, options.width, options.heads, options.context, options.dropout))
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    data = text.read(options.text)

    def train() -> None:
        rank = dist.get_rank()
        ddp = DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb)
        scheduler = LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, options.iterations))
        torch.manual_seed(options.seed + 1 + rank)  # different batches and dropout on each rank

        start, _ = checkmate.restore(ddp, optimizer, scheduler=scheduler)
        protection = checkmate.protect(ddp, optimizer, scheduler=scheduler)
        log = LossLog(options.out)

        with protection:
            for iteration in protection.steps(range(start, options.iterations)):
                batch = data.batch(options.batch, options.context)
                loss = ddp(*(tokens.to(options.device) for tokens in batch))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                log(iteration, loss.item())
        log.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    run(train, in_place=options.in_place)


def warm_up_then_cosine(step: int, steps: int, warm_up: int = 10) -> float:
    """Return the factor of the learning rate at a step."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1)))


def parse() -> argparse.Namespace:
    arg_parser = parser("checkmate.examples.gpt.train", __doc__, 100)
    arg_parser.add_argument("--text", type=Path, help="file to train on; Python's documentation by default")
    arg_parser.add_argument("--batch", type=int, default=2, help="batch size per rank")
    arg_parser.add_argument("--context", type=int, default=64, help="context length in bytes")
    arg_parser.add_argument("--layers", type=int, default=4)
    arg_parser.add_argument("--width", type=int, default=320)
    arg_parser.add_argument("--heads", type=int, default=5)
    arg_parser.add_argument("--dropout", type=float, default=0.1)
    arg_parser.add_argument("--learning-rate", type=float, default=1e-3)
    add_device(arg_parser)
    add_in_place(arg_parser)
    arg_parser.add_argument("--bucket-mb", type=float, default=4, help="size of gradient buckets in MiB")
    return arg_parser.parse_args()


if __name__ == "__main__":
    main()
