"""Clipping that shadow nodes can repeat: torch's, with the coefficient noted in the step record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from checkmate.training.attached import AttachedData, attach, attached, detach

Noted = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Told which parameters' gradients were multiplied, and by what."""


class ClipListener(AttachedData):
    """Kept at parameters until `close`. `before` is called ahead of each clipping, `noted` after it."""

    def __init__(self, parameters: Sequence[nn.Parameter], before: Callable[[], None], noted: Noted) -> None:
        self.before = before
        self.noted = noted
        self._parameters = parameters
        for parameter in parameters:
            attach(parameter, self)

    def close(self) -> None:
        """Listen no more."""
        for parameter in self._parameters:
            detach(parameter, self)


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
    found = {id(listener): listener for p in chosen if (listener := attached(p, ClipListener))}
    for listener in found.values():
        listener.before()
    norm = torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
    if found and any(p.grad is not None for p in chosen):
        # torch's own expression: its clip_grad_norm_ returns the norm alone
        coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        for listener in found.values():
            listener.noted(chosen, coefficient)
    return norm
