"""Clipping that shadow nodes can repeat: torch's, with the coefficient noted in the step record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import nn

Noted = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Told which parameters' gradients were multiplied, and by what."""

_listeners: Final[dict[int, tuple[Callable[[], None], Noted]]] = {}  # by id; whoever listens holds it


def listen(parameters: Iterable[nn.Parameter], before: Callable[[], None], noted: Noted) -> None:
    """Have `before` called ahead of each clipping of these parameters, and `noted` after it.

    Hold the parameters until `forget`.
    """
    for parameter in parameters:
        _listeners[id(parameter)] = (before, noted)


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Take `listen` back."""
    for parameter in parameters:
        _listeners.pop(id(parameter), None)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`, and the step record says by what gradients were multiplied.

    The same arguments, result and bits; without `checkmate.protect` it is torch's and nothing else.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    found = {listener[0]: listener for p in chosen if (listener := _listeners.get(id(p)))}
    for before, _ in found.values():
        before()
    norm = torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
    if found and any(p.grad is not None for p in chosen):
        # torch's own expression: its clip_grad_norm_ returns the norm alone
        coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        for _, noted in found.values():
            noted(chosen, coefficient)
    return norm
