"""Train with Hugging Face's Trainer: a subclass restores, protects, and skips what is trained.

CHECKMATE_JOB=job.yaml torchrun --nnodes 4 ... --max-restarts 10 -m checkmate.examples.huggingface

Trainer makes DDP, optimizer and scheduler in `_prepare_for_training`, and runs an epoch in `_run_epoch`,
which also skips the batches that were used before. `CheckmateTrainer` is all that a script needs. Batches
follow from the seed and the number of the epoch, so their place follows from that of the iteration.
(`pip install transformers accelerate`; tried with transformers 5.24)
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainingArguments

import checkmate
from checkmate.examples.common import LossLog, parser

ROWS, INPUTS, BATCH = 320, 32, 16


class CheckmateTrainer(Trainer):
    """A Trainer that shadow nodes follow, and that resumes from them."""

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Restore once DDP, optimizer and scheduler are there, and have the shadow nodes follow."""
        ddp, batches = super()._prepare_for_training(*args, **kwargs)
        state = {"scheduler": self.lr_scheduler}
        self.state.global_step, _ = checkmate.restore(ddp, self.optimizer.optimizer, **state)
        self._begin, self._generator = self.state.global_step, torch.get_rng_state()
        self.add_callback(LoopBoundary(checkmate.protect(ddp, self.optimizer.optimizer, **state)))
        return ddp, batches

    def _run_epoch(self, *, epoch: int, num_update_steps_per_epoch: int, **kwargs: Any) -> None:
        """Run an epoch, or the rest of it, unless it is over."""
        epochs, steps = divmod(self._begin, num_update_steps_per_epoch)
        if epoch >= epochs:
            kwargs["epochs_trained"] = epochs
            kwargs["steps_trained_in_current_epoch"] = steps * self.args.gradient_accumulation_steps
            kwargs["resume_from_checkpoint"] = "" if self._begin else None
            super()._run_epoch(epoch=epoch, num_update_steps_per_epoch=num_update_steps_per_epoch, **kwargs)

    def _load_rng_state(self, checkpoint: str) -> None:
        """Restore the generator, which the skipped batches may have moved."""
        torch.set_rng_state(self._generator)


class LoopBoundary(TrainerCallback):
    """The end of a step is the loop boundary."""

    def __init__(self, protection: checkmate.Protection) -> None:
        self.protection = protection

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Name the loop boundary."""
        self.protection.mark()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Wait until the shadow nodes have the last iteration."""
        self.protection.close()


class LoggingTrainer(CheckmateTrainer):
    """Also shows the loss of each iteration."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Do forward and backward."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.loss_log(self.state.global_step, loss.item())
        return loss


class Regression(nn.Module):
    """A small model that learns sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(INPUTS, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, INPUTS))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, as models of transformers do."""
        return {"loss": functional.mse_loss(self.layers(inputs), labels)}


def data() -> list[dict[str, torch.Tensor]]:
    """Return random inputs with a target that a small model can learn."""
    inputs = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0))
    return [{"inputs": row, "labels": row.cumsum(0).tanh()} for row in inputs]


def main() -> None:
    """Train, and print the loss of each iteration."""
    options = parser("checkmate.examples.huggingface", __doc__, 60).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            seed=options.seed,
            per_device_train_batch_size=BATCH,
            max_steps=options.iterations,
            learning_rate=1e-2,
            save_strategy="no",  # shadow nodes have each iteration; `checkmate consolidate` writes them
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        torch.manual_seed(options.seed)  # the same model on all ranks
        trainer = LoggingTrainer(Regression(), arguments, train_dataset=data())
        trainer.loss_log = LossLog(options.out)
        trainer.train()
        log: LossLog = trainer.loss_log
        log.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()})
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
