"""Train with torchtitan's own trainer: its checkpoint manager restores, protects, and marks iterations.

CHECKMATE_JOB=job.yaml torchrun --nnodes 2 --nproc-per-node 2 ... -m checkmate.examples.titan.train

torchtitan's trainer calls its checkpoint manager once before its loop and once at the end of each step, so a
subclass is all that Checkmate needs of it. Two names are replaced: the one that decides whether FSDP reduces
over the replicas, and the function that clips.
(`pip install torchtitan`)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import ParallelDims

import checkmate
from checkmate.examples.common import LossLog, parser, whole_state
from checkmate.examples.titan import small


class Checkpoints(CheckpointManager):
    """torchtitan's checkpoint manager, which asks the shadow nodes first, and has them follow."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """As torchtitan's."""

    def _load(self, step: int = -1) -> bool:
        """Restore from the shadow nodes, or else from torchtitan's own folder; protect. Before the loop."""
        (model,), (optimizer,) = self.states["model"].model, self.states["optimizer"].optimizers
        (scheduler,) = self.states["lr_scheduler"].schedulers
        parts = {name: self.states[name] for name in ("train_state", "dataloader")}
        _, extra = checkmate.restore(model, optimizer, scheduler=scheduler)
        for name, part_state in (extra or {}).items():
            parts[name].load_state_dict(part_state)
        loaded = extra is not None or super()._load(step)
        self.protection = checkmate.protect(
            model,
            optimizer,
            scheduler=scheduler,
            extra=lambda: {name: part.state_dict() for name, part in parts.items()},
        )
        return bool(loaded)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Mark the end of an iteration; save as torchtitan does. After each step."""
        self.protection.mark()
        return bool(super()._save(curr_step, last_step))

    def _close(self) -> None:
        """Wait until the shadow nodes have the last iteration."""
        if hasattr(self, "protection"):
            self.protection.close()
        super()._close()


def protected(config: Any) -> None:
    """Have Checkmate protect the run of a configuration."""
    ParallelDims.dp_replicate_enabled = False  # FSDP gets the mesh of the shards, Checkmate reduces the rest
    config.checkpoint = Checkpoints.Config(enable=True)


class Losses(BaseLogger):
    """Shows losses as the other examples do, beside torchtitan's own log."""

    def __init__(self, log: LossLog) -> None:
        self._log = log

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Show the loss of a step; torchtitan counts from 1."""
        self._log(step - 1, metrics["loss_metrics/global_avg_loss"])


def main() -> None:
    """Train, and print the loss of each iteration."""
    arg_parser = parser("checkmate.examples.titan.train", __doc__, 60)
    arg_parser.add_argument(
        "--checkpoints", type=Path, help="torchtitan's folder of checkpoints; none by default"
    )
    arg_parser.add_argument("--plain", action="store_true", help="train without Checkmate")
    options = arg_parser.parse_args()
    config = small.config(options.iterations, options.seed)
    if options.plain:
        config.checkpoint.enable = options.checkpoints is not None
    else:
        protected(config)
    config.dump_folder = str(options.checkpoints or "no-checkpoints")
    config.checkpoint.load_only = options.checkpoints is None
    config.checkpoint.last_save_model_only = False
    trainer = config.build()
    log = LossLog(options.out)
    trainer.metrics_processor.logger = Losses(log)
    trainer.train()
    trainer.close()
    log.save(whole_state(trainer.model_parts[0], trainer.optimizers.optimizers[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
