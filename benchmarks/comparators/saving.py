"""Checkpoints that training waits for, and PyTorch's asynchronous ones."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.comparators.system import CheckpointSystem, broadcast_value

_MAX_CHECKPOINTS: Final = 2
"""Checkpoints that are kept: a failure may come while the newest is being written."""
_ITERATION: Final = "iteration"


def write(state: dict[str, Any], iteration: int, folder: Path) -> None:
    """Write a checkpoint with torch.save, flush it to the disk, and remove all but the newest ones."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".unfinished"
    with temporary.open("wb") as file:
        torch.save({**state, _ITERATION: iteration}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / f"{iteration}.pt")
    for old in checkpoint_numbers(folder)[:-_MAX_CHECKPOINTS]:
        (folder / f"{old}.pt").unlink()


def checkpoint_numbers(folder: Path) -> list[int]:
    """Return the iterations of complete checkpoints, in order."""
    files = folder.glob("[0-9]*.pt")
    return sorted(int(file.stem) for file in files)


def read_newest(folder: Path) -> dict[str, Any] | None:
    """Return the newest checkpoint that `write` has completed; all ranks call it."""
    newest = broadcast_value(checkpoint_numbers(folder)[-1:])
    if not newest:
        return None
    state: dict[str, Any] = torch.load(folder / f"{newest[0]}.pt", weights_only=True)
    return state


class SavedFiles(CheckpointSystem):
    """Resumes from the files of `write`."""

    def recover(self) -> int:
        """Load the newest checkpoint."""
        state = read_newest(self.place.disk)
        if state is None:
            return 0
        iteration = int(state.pop(_ITERATION))
        self.install(state)
        return iteration + 1


class TorchSave(SavedFiles):
    """Rank 0 saves with torch.save, and the others wait for it in the next AllReduce."""

    name = "torch.save"

    def after_step(self, iteration: int) -> None:
        """Save on rank 0."""
        if self.is_due(iteration) and self.rank == 0:
            write(self.state(), iteration, self.place.disk)


class DcpSave(CheckpointSystem):
    """All ranks save with PyTorch Distributed Checkpoint, each a part, and wait for all."""

    name = "DCP"

    def after_step(self, iteration: int) -> None:
        """Save on all ranks."""
        if self.is_due(iteration):
            save(self._part(), checkpoint_id=self._folder(iteration))
            self._prune()

    def recover(self) -> int:
        """Load the newest checkpoint that has an index, which is written last."""
        newest = broadcast_value(self._complete()[-1:])
        if not newest:
            return 0
        state = self.state()
        load(state, checkpoint_id=self._folder(newest[0]))
        self.install(state)
        return int(newest[0]) + 1

    def state(self) -> dict[str, Any]:
        """Return the state with the names that DCP needs; it makes the optimizer's if there is none yet."""
        model, optimizer = get_state_dict(self._ddp, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def install(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        state_dicts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._ddp, self._optimizer, **state_dicts)

    def _part(self) -> dict[str, Any]:
        """Return what this rank may save: DCP divides the state, but DDP takes all buffers from rank 0."""
        state = self.state()
        if self.rank:
            for name, _ in self._ddp.module.named_buffers():
                del state["model"][name]
        return state

    def _folder(self, iteration: int) -> Path:
        return self.place.disk / str(iteration)

    def _complete(self) -> list[int]:
        indices = self.place.disk.glob("[0-9]*/.metadata")
        return sorted(int(index.parent.name) for index in indices)

    def _prune(self) -> None:
        if self.rank == 0:
            for old in self._complete()[:-_MAX_CHECKPOINTS]:
                shutil.rmtree(self._folder(old))


class DcpAsyncSave(DcpSave):
    """The same with `async_save`: training waits for a copy in memory. One is written at a time."""

    name = "DCP async_save"

    def attach(self, ddp: Any, optimizer: torch.optim.Optimizer) -> None:
        """Take over the job, and make a process group for the writing threads."""
        super().attach(ddp, optimizer)
        self._group = dist.new_group(backend="gloo")
        self._pending: Future[Any] | None = None

    def after_step(self, iteration: int) -> None:
        """Wait for the checkpoint before, and begin this one."""
        if not self.is_due(iteration):
            return
        self.finish()
        pending = async_save(self._part(), checkpoint_id=self._folder(iteration), process_group=self._group)
        assert isinstance(pending, Future)
        self._pending = pending

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
            self._prune()
