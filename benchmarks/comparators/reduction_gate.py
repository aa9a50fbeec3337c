"""A gate for traffic beside training's: open while no gradients are being reduced."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

import threading
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed's, where mypy finds it

_SECONDS: Final = 60.0


class ReductionGate:
    """A gate that is open while no gradients are being reduced."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._condition = threading.Condition()
        self._reducing = 0

    def wait(self) -> None:
        """Wait until none are. Raise `TimeoutError` after a minute."""
        with self._condition:
            if not self._condition.wait_for(lambda: not self._reducing, _SECONDS):
                raise TimeoutError(f"gradients have been reduced for {_SECONDS:g} s")

    def averaging(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP does by itself: a communication hook."""
        self._add(1)
        tensor = bucket.buffer().div_(self._group.size())
        reduced = dist.all_reduce(tensor, group=self._group, async_op=True).get_future()
        averaged: torch.futures.Future[torch.Tensor] = reduced.then(self._end_reduction)
        return averaged

    def _end_reduction(self, reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        self._add(-1)
        return reduced.value()[0]

    def _add(self, count: int) -> None:
        with self._condition:
            self._reducing += count
            self._condition.notify_all()
