"""Gradient clipping that shadow nodes can repeat: torch's, with its coefficient in the step record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from checkmate.training.attached import AttachedData, attach, attached, detach

Noted = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Called with the parameters whose gradients were multiplied, and with the factor."""


class ClipListener(AttachedData):
    """Attached to parameters until `close`. `before` is called before each clipping, `noted` after it."""

    def __init__(self, parameters: Sequence[nn.Parameter], before: Callable[[], None], noted: Noted) -> None:
        self.before = before
        self.noted = noted
        self._parameters = parameters
        for parameter in parameters:
            attach(parameter, self)

    def close(self) -> None:
        """Detach from the parameters."""
        for parameter in self._parameters:
            detach(parameter, self)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients with `torch.nn.utils.clip_grad_norm_`, and note the coefficient in the step record.

    The result is the same, bit for bit. Without `checkmate.protect` this is torch's function alone.

    Args:
        parameters: The parameters whose gradients are clipped, together.
        max_norm: The largest total norm.
        norm_type: The order of the norm; `inf` for the maximum norm.
        error_if_nonfinite: Raise an error if the total norm is not finite.
        foreach: Use torch's foreach implementation; by default torch decides.

    Returns:
        The total norm of the gradients before clipping: a scalar tensor.

    Raises:
        RefusedError: A gradient was changed since DDP's reduction in a way that shadow nodes can't repeat.
        RuntimeError: The total norm is not finite, with `error_if_nonfinite`.
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
