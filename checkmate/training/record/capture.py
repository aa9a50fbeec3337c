"""Takes all that a resumed run needs beside parameters and optimizer state, at one moment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from checkmate.optim.supported import options_of
from checkmate.training.record import rng
from checkmate.training.record.buffers import Buffers, Later
from checkmate.training.record.scheduler import class_of


@dataclass(frozen=True)
class Watched:
    """The objects of a training script that a rank's records are about."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    scaler: Any = None
    extra: Callable[[], Any] | None = None


@dataclass(frozen=True)
class IterationEnd:
    """What a rank had as an iteration ended. What only the group's first rank says is empty on others."""

    rng: dict[str, Any]
    extra: Any
    next_options: list[str]
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    scheduler_class: str


class Capture:
    """Of the objects of a script. `first`: the group's first rank, which speaks for the others."""

    def __init__(self, watched: Watched, buffers: Buffers | None, *, first: bool) -> None:
        self._watched = watched
        self._buffers = buffers
        self._first = first

    def take(self, *, in_loop: bool = False) -> IterationEnd:
        """Copies of all but buffers, as they are now. `in_loop`: between two batches of one iterator."""
        watched, first = self._watched, self._first
        return IterationEnd(
            rng=rng.capture(in_loop=in_loop),
            extra=None if watched.extra is None else copy.deepcopy(watched.extra()),
            next_options=[options_of(group) for group in watched.optimizer.param_groups] if first else [],
            scheduler=_state_of(watched.scheduler) if first else None,
            scaler=_state_of(watched.scaler) if first else None,
            scheduler_class=class_of(watched.scheduler) if first else "",
        )

    def buffers(self, before: Mapping[str, Later] | None) -> dict[str, Later]:
        """Copies of the buffers that the iteration's record has to say.

        `before`: what was taken at an earlier moment of the same iteration; only what has changed since then
        is copied again.
        """
        if self._buffers is None:
            return {}
        if before is None:
            return self._buffers.take()
        since = self._buffers.changes()
        return {name: later for name, later in before.items() if name in self._buffers.names} | since


def _state_of(thing: Any) -> dict[str, Any] | None:
    """A scheduler's or scaler's state as it is now."""
    return None if thing is None else copy.deepcopy(thing.state_dict())
