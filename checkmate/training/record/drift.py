"""Checks at the beginning of a run whether captured state changes before the next forward.

Without marks, such a change may belong to the iteration before it, and a resumed run would lack it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from checkmate.state import bytes_of
from checkmate.training.record.buffers import kept_beside
from checkmate.training.record.capture import IterationEnd, Watched

_log: Final = logging.getLogger("checkmate")

CHECKED: Final = 4
"""The number of iterations checked. Each check copies the state and waits for a CUDA device."""
SAMPLED: Final = 4096
"""The number of elements compared per buffer or frozen parameter, evenly spread."""


class DriftWatch:
    """Warns once, if it is `active`: on the group's first rank, because all ranks run the same script."""

    def __init__(self, watched: Watched, *, active: bool) -> None:
        self._watched = watched
        self._left = CHECKED if active else 0
        self._captured: dict[str, Any] | None = None

    def note(self, end: IterationEnd) -> None:
        """Note a capture, in place of an earlier one of the same iteration."""
        if self._left:
            self._captured = {
                "extra()": end.extra,
                "the scheduler": end.scheduler,
                "the scaler": end.scaler,
                **self._samples(),
            }

    def forget(self) -> None:
        """Stop checking: the script marks where its iterations end."""
        self._captured, self._left = None, 0

    def check(self, iteration: int) -> None:
        """Warn, as the next forward begins, if something has changed since the capture."""
        captured, self._captured = self._captured, None
        if captured is None:
            return
        self._left -= 1
        now = self._now()
        changed = [name for name, value in captured.items() if not same(value, now.get(name))]
        if changed:
            self._left = 0
            _log.warning(
                "iteration %d: %s changed between the optimizer's or scheduler's step, when it was "
                "captured, and the next forward. If that change belongs to the iteration, a resumed run "
                "lacks it. Mark the end of iterations with `for batch in protection.steps(loader)`, or with "
                "protection.mark() as the last statement of the loop (docs/training.md)",
                iteration,
                _listed(changed),
            )

    def _now(self) -> dict[str, Any]:
        watched = self._watched
        return {
            "extra()": None if watched.extra is None else watched.extra(),
            "the scheduler": None if watched.scheduler is None else watched.scheduler.state_dict(),
            "the scaler": None if watched.scaler is None else watched.scaler.state_dict(),
            **self._samples(),
        }

    def _samples(self) -> dict[str, torch.Tensor]:
        return {name: _sample(tensor) for name, tensor in kept_beside(self._watched.ddp).items()}


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copy some elements of a tensor to the CPU."""
    flat = tensor.detach().resolve_conj().reshape(-1)
    return flat[:: max(flat.numel() // SAMPLED, 1)].to("cpu", copy=True).contiguous()


def same(one: Any, other: Any) -> bool:
    """Return whether two plain states (see `checkmate.state.dumps`) are equal, tensors bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        mine, theirs = (x.detach().cpu().resolve_conj().contiguous() for x in (one, other))
        return bytes_of(mine) == bytes_of(theirs)
    if isinstance(one, np.ndarray | np.generic):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return bool(alike and one.tobytes() == other.tobytes())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))  # noqa: PLR0124 - not a number


def _listed(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
