"""Checkpoints that a script saves itself, for `benchmarks.training.iteration`; it runs inside each rank.

The mode is the function and the interval: `torch.save 5`, `async_save 1`. In any other mode, nothing is
saved.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from topologies.training.in_rank import RankHooks

FOLDER: Final = "CHECKMATE_SAVE_TO"


class Saver:
    """Periodic checkpoints of parameters and optimizer state."""

    def __init__(self, run: RankHooks, ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
        self._run = run
        self._model, self._optimizer = ddp.module, optimizer
        self._folder = Path(os.environ[FOLDER])
        self._group = dist.new_group(backend="gloo")
        self._pending: Future[Any] | None = None
        self._steps = 0
        self._mode = ""

    def after_step(self) -> None:
        """Save if it is due: in the middle of each interval, counted from the mode's first step."""
        if self._run.mode != self._mode:
            self._mode, self._steps = self._run.mode, 0
            self._finish()
        self._steps += 1
        method, _, interval = self._mode.partition(" ")
        if not interval or (self._steps + int(interval) // 2) % int(interval):
            return
        if method == "torch.save" and dist.get_rank() == 0:
            torch.save(self._state(), self._folder / "model.pt")
        elif method == "async_save":
            self._finish()  # two saves at a time would write the same files
            target = self._folder / "dcp"
            pending = async_save(self._state(), checkpoint_id=target, process_group=self._group)
            assert isinstance(pending, Future)
            self._pending = pending

    def _finish(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}


def install(run: RankHooks, ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
    """Save from now on."""
    saver = Saver(run, ddp, optimizer)
    optimizer.register_step_post_hook(lambda *_: saver.after_step())
