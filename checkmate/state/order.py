"""Conversion of parameters and optimizer state to memory order, and back. Pure; without copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from checkmate.wire.layout import Parameter

Values = tuple[torch.Tensor, dict[str, object]]
"""A parameter and its optimizer state."""


def in_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a tensor with its dimensions in the given order, or unchanged if `order` is empty."""
    return tensor.permute(*order) if order else tensor


def from_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the argument of `in_memory_order`, with the same strides if it is contiguous."""
    return tensor.permute([order.index(d) for d in range(len(order))]) if order else tensor


def to_held(parameter: Parameter, tensor: torch.Tensor, state: Mapping[str, object]) -> Values:
    """Convert a parameter and its state from the script's form to that of shadow nodes."""
    return _turned(in_memory_order, parameter.dim_order, tensor, state)


def from_held(parameter: Parameter, tensor: torch.Tensor, state: Mapping[str, object]) -> Values:
    """Convert a parameter and its state from the form of shadow nodes to the script's."""
    return _turned(from_memory_order, parameter.dim_order, tensor, state)


def _turned(
    turn: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    order: Sequence[int],
    tensor: torch.Tensor,
    state: Mapping[str, object],
) -> Values:
    """Convert a parameter, and all tensors of its state that have the parameter's shape."""
    return turn(tensor, order), {
        name: turn(value, order) if isinstance(value, torch.Tensor) and value.shape == tensor.shape else value
        for name, value in state.items()
    }
