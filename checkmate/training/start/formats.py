"""Memory formats: what a script's tensors must agree on, and how state gets the format of its parameter."""

from __future__ import annotations

import torch

from checkmate.state import in_memory_order
from checkmate.wire.layout import LayoutError, Parameter, dim_order


def check_format(known: Parameter, reduced: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """`RuntimeError` if DDP's bucket or `.grad` has another memory format than the parameter.

    `reduced`: the parameter's run of the bucket, flat, before it is reduced: then `gradient`'s elements.
    """
    if gradient is None or len(known.shape) < 2:
        return
    if _order(gradient) == known.dim_order:
        local = in_memory_order(gradient.detach(), known.dim_order).reshape(-1)
        if torch.equal(local, reduced) or not torch.equal(local.sort()[0], reduced.sort()[0]):
            return  # with other elements it isn't this backward's, as that of an unused parameter
    raise RuntimeError(
        f"the gradient of {known.name} has another memory format than the parameter: choose memory formats "
        "before DistributedDataParallel is built, and let backward make .grad, which does if it is None"
    )


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give optimizer state the memory format of its parameter, as the optimizer itself would have.

    What a script loaded may have another one. Steps then give other bits, and torch's fused ones wrong
    values.
    """
    for parameter, entries in optimizer.state.items():
        entries.update({name: _laid_out(parameter, value) for name, value in entries.items()})


def _laid_out(parameter: torch.Tensor, value: object) -> object:
    """An entry of its state: a tensor of its shape has its memory format."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if _order(value) == _order(parameter):
        return value
    made = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return made.copy_(value)


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of its dimensions in memory; `None` if it isn't dense."""
    try:
        return dim_order(tensor.shape, tensor.stride())
    except LayoutError:
        return None
