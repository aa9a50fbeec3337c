"""Memory formats: checks that gradients match their parameters, and converts optimizer state."""

from __future__ import annotations

import torch

from checkmate.state import in_memory_order
from checkmate.wire.layout import LayoutError, Parameter, dim_order


def check_format(known: Parameter, reduced: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Raise `RuntimeError` if DDP's bucket or `.grad` has another memory format than the parameter.

    Args:
        known: The parameter.
        reduced: Its flat part of DDP's bucket before the reduction: the elements of `gradient`.
        gradient: Its `.grad`.
    """
    if gradient is None or len(known.shape) < 2:
        return
    if _order(gradient) == known.dim_order:
        local = in_memory_order(gradient.detach(), known.dim_order).reshape(-1)
        if torch.equal(local, reduced) or not torch.equal(local.sort()[0], reduced.sort()[0]):
            return  # with other elements it is not of this backward: the parameter was not used
    raise RuntimeError(
        f"the gradient of {known.name} has another memory format than the parameter: choose memory formats "
        "before DistributedDataParallel is constructed, and let backward create .grad by leaving it None"
    )


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give optimizer state the memory format of its parameter, as the optimizer itself would.

    State that a script has loaded may have another one. Then steps give other bits, and torch's fused
    implementations wrong values.
    """
    for parameter, entries in optimizer.state.items():
        entries.update({name: _laid_out(parameter, value) for name, value in entries.items()})


def _laid_out(parameter: torch.Tensor, value: object) -> object:
    """Return an entry of a parameter's state, in its memory format if it has the parameter's shape."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if _order(value) == _order(parameter):
        return value
    made = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return made.copy_(value)


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of the dimensions in memory, or `None` if the tensor is not dense."""
    try:
        return dim_order(tensor.shape, tensor.stride())
    except LayoutError:
        return None
