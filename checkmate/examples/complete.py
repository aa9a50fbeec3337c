"""Train with all that scripts usually have; what a resumed run needs of it is marked with "Checkmate".

CHECKMATE_JOB=job.yaml torchrun --nnodes 4 ... --max-restarts 10 -m checkmate.examples.complete

There are a DataLoader with a worker, accumulated gradients, mixed precision with a GradScaler, clipping, a
schedule, and on rank 0 an EMA that is evaluated every few iterations.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

import checkmate
from checkmate.examples.common import LossLog, parser
from checkmate.examples.loader import INPUTS, NoisySines

BATCH, MICRO, EVALUATION_INTERVAL = 16, 2, 10
"""Rows of a micro-batch, micro-batches of an iteration, and iterations from one evaluation to the next."""


def main() -> None:
    """Train whole epochs, and print the loss of each iteration."""
    options = parser("checkmate.examples.complete", __doc__, 60).parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)  # the same model on all ranks
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, INPUTS))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = OneCycleLR(optimizer, 1e-2, options.iterations + BATCH)
    scaler = torch.amp.GradScaler("cpu", growth_interval=8)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if dist.get_rank() == 0 else None
    best = float("inf")
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # different dropout on each rank
    data = NoisySines()
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data), num_workers=1)

    # Checkmate: the loader's place, what is restored, and what is kept
    batches = checkmate.Batches(loader)
    iteration, extra = checkmate.restore(ddp, optimizer, scheduler=scheduler, scaler=scaler)
    if extra is not None:
        batches.load_state_dict(extra["batches"])
        best = extra["best"]
        if ema is not None:
            ema.load_state_dict(extra["ema"])

    def extra_state() -> dict[str, Any]:
        ema_state = None if ema is None else ema.state_dict()
        return {"batches": batches.state_dict(), "best": best, "ema": ema_state}

    protection = checkmate.protect(ddp, optimizer, scheduler=scheduler, scaler=scaler, extra=extra_state)

    log = LossLog(options.out)
    for _ in batches.epochs(
        -(-options.iterations * MICRO // len(batches))
    ):  # Checkmate: from the present one
        for rows in protection.steps(batches):  # Checkmate: the end of a turn is where a resumed run goes on
            complete = batches.used % MICRO == 0
            with nullcontext() if complete else ddp.no_sync():
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = functional.mse_loss(ddp(rows), rows) / MICRO
                scaler.scale(loss).backward()
            if not complete:
                continue
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update_parameters(model)
                if iteration % EVALUATION_INTERVAL == EVALUATION_INTERVAL - 1:
                    best = min(best, evaluate(ema))
            log(iteration, loss.item() * MICRO)
            iteration += 1
    protection.close()  # Checkmate
    log.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **extra_state()})
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the loss of rows that were not trained."""
    data = NoisySines()
    rows = torch.stack([data[len(data) + row] for row in range(BATCH)])
    model.eval()
    loss = functional.mse_loss(model(rows), rows).item()
    model.train()
    return loss


if __name__ == "__main__":
    main()
