"""Parameters and optimizer state in memory order, as shadow nodes hold them, and back. Pure; no copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from checkmate.wire.layout import Parameter

Values = tuple[torch.Tensor, dict[str, object]]
"""A parameter and its optimizer state."""


def in_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A tensor with its dimensions from the outermost in memory to the innermost; empty: as they are."""
    return tensor.permute(*order) if order else tensor


def from_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """What `in_memory_order` was given, with the same strides if it is contiguous."""
    return tensor.permute([order.index(d) for d in range(len(order))]) if order else tensor


def to_held(parameter: Parameter, tensor: torch.Tensor, state: Mapping[str, object]) -> Values:
    """A parameter and its state as the script has them, as a shadow node holds them."""
    return _turned(in_memory_order, parameter.dim_order, tensor, state)


def from_held(parameter: Parameter, tensor: torch.Tensor, state: Mapping[str, object]) -> Values:
    """A parameter and its state as a shadow node holds them, as the script has them."""
    return _turned(from_memory_order, parameter.dim_order, tensor, state)


def _turned(
    turn: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    order: Sequence[int],
    tensor: torch.Tensor,
    state: Mapping[str, object],
) -> Values:
    """With all that has a value for each element of the parameter."""
    return turn(tensor, order), {
        name: turn(value, order) if isinstance(value, torch.Tensor) and value.shape == tensor.shape else value
        for name, value in state.items()
    }
