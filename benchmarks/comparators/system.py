"""The interface of what the evaluation compares, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class CheckpointFolders:
    """The folders of a rank's checkpoints, and their interval.

    Attributes:
        disk: A folder that all ranks share.
        memory: A folder in this host's memory, such as a tmpfs, which outlives the process.
        interval: The number of iterations from one checkpoint to the next.
    """

    disk: Path
    memory: Path
    interval: int = 1


class CheckpointSystem(ABC):
    """A way to survive failures of a DDP job. All ranks make the same calls.

    A script calls `attach`, then `recover`, and `after_step` after each step of the optimizer.
    """

    name: ClassVar[str]
    switchable: ClassVar[bool] = True
    """A job without calls of `after_step` is like one without the system."""

    def __init__(self, place: CheckpointFolders) -> None:
        self.place = place

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Take over the job's model and optimizer."""
        self._ddp, self._optimizer = ddp, optimizer
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    @property
    def interval(self) -> int:
        """The number of iterations from one checkpoint to the next, now."""
        return self.place.interval

    def is_due(self, iteration: int) -> bool:
        """Return whether a checkpoint follows an iteration."""
        return (iteration + 1) % self.place.interval == 0

    @abstractmethod
    def after_step(self, iteration: int) -> None:
        """Begin or make the checkpoint of an iteration, if it is due."""

    @abstractmethod
    def recover(self) -> int:
        """Install the newest checkpoint that all ranks can have. Return the next iteration; 0 without one."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait until all that has begun is complete."""

    def close(self) -> None:
        """Finish, and end threads and processes."""
        self.finish()

    def state(self) -> dict[str, Any]:
        """Return the state to save, by name. The tensors are the job's own, not copies."""
        return {"model": self._ddp.module.state_dict(), "optimizer": self._optimizer.state_dict()}

    def steady_state(self) -> dict[str, Any]:
        """Return the state that the optimizer's next step changes first, with copies of the buffers.

        The next forward changes buffers, and does not wait for a copy in the background.
        """
        state = self.state()
        for name, buffer in self._ddp.module.named_buffers():
            if name in state["model"]:
                state["model"][name] = buffer.clone()
        return state

    def install(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self._ddp.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


class NoCheckpoints(CheckpointSystem):
    """Training begins with iteration 0 after each failure."""

    name = "none"

    def after_step(self, iteration: int) -> None:
        """Do nothing."""

    def recover(self) -> int:
        """Return 0."""
        return 0


def broadcast_value(value: Any) -> Any:
    """Return rank 0's value on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


class PartedState(CheckpointSystem):
    """Its state has buffers first: ranks have different ones, and DDP takes rank 0's."""

    def state(self) -> dict[str, Any]:
        """Return the state to save, by name. The tensors are the job's own, not copies."""
        return {
            "buffers": dict(self._ddp.module.named_buffers()),
            "parameters": dict(self._ddp.module.named_parameters()),
            "optimizer": self._optimizer.state_dict(),
        }

    def install(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        super().install(
            {"model": {**state["buffers"], **state["parameters"]}, "optimizer": state["optimizer"]}
        )

    def buffers(self) -> list[torch.Tensor]:
        """Return the tensors that are rank 0's part."""
        return list(self._ddp.module.buffers())
