"""Train with Lightning: a callback restores and protects, and the module steps by itself.

CHECKMATE_JOB=job.yaml torchrun --nnodes 4 ... --max-restarts 10 -m checkmate.examples.lightning

Lightning's automatic optimization runs forward and backward inside of `optimizer.step(closure)`, which
Checkmate cannot follow. So the module optimizes manually, with PyTorch's own optimizer. Lightning's loops
travel with each iteration's record, by `extra`, and with them the place of a StatefulDataLoader.
(`pip install lightning torchdata`)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import checkmate
from checkmate.examples.common import LossLog, parser

ROWS, INPUTS, BATCH = 320, 32, 16


class CheckmateCallback(Callback):
    """Restores and protects once Lightning has made DDP and optimizer; the end of a batch is the boundary."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore model, optimizer, loops and loader, and have the shadow nodes follow."""
        (optimizer,) = trainer.optimizers
        loops, ddp = trainer.fit_loop, trainer.strategy.model
        assert isinstance(ddp, DistributedDataParallel)
        _, extra = checkmate.restore(ddp, optimizer)
        if extra is not None:
            if extra["epoch_loop.batch_progress"]["is_last_batch"]:
                extra["state_dict"].clear()  # the next epoch begins with a loader that is not exhausted
            loops.load_state_dict(extra)
        self.protection = checkmate.protect(ddp, optimizer, extra=loops.state_dict)

    def on_train_batch_end(self, *_: Any) -> None:
        """Name the loop boundary."""
        self.protection.mark()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until the shadow nodes have the last iteration."""
        self.protection.close()


class Regression(LightningModule):
    """A small model that learns sums; `folder` is for its losses."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(INPUTS, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, INPUTS))
        self.folder = folder

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Train with one batch."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        inputs, targets = batch
        loss = functional.mse_loss(self.layers(inputs), targets)
        optimizer.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()
        iteration = self.trainer.fit_loop.epoch_loop.total_batch_idx
        LossLog(self.folder)(iteration, loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return PyTorch's AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train, and print the loss of each iteration."""
    options = parser("checkmate.examples.lightning", __doc__, 60).parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(options.seed)  # the same model on all ranks
    module = Regression(options.out)
    inputs = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.cumsum(1).tanh())
    sampler = StatefulDistributedSampler(data, ranks, rank)
    # Its own generator: an iterator draws from it, so dropout's random numbers are as without a restart.
    loader = StatefulDataLoader(data, BATCH, sampler=sampler, generator=torch.Generator())
    epochs = -(-options.iterations // len(loader))
    torch.manual_seed(options.seed + 1 + rank)  # different dropout on each rank
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=ranks // local_ranks,
        devices=local_ranks,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,  # there is one
        max_epochs=epochs,
        callbacks=[CheckmateCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    (optimizer,) = trainer.optimizers
    LossLog(options.out).save({"model": module.state_dict(), "optimizer": optimizer.state_dict()})


if __name__ == "__main__":
    main()
