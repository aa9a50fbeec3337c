"""A state dictionary as one sequence of bytes, of which a range can be copied. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

_TENSOR: Final = "a tensor of the sequence"


@dataclass(frozen=True)
class FlatState:
    """The tensors of a state, and the state with a description in place of each.

    `described` has plain values only, so `torch.load(weights_only=True)` reads it.
    """

    tensors: Sequence[torch.Tensor]
    described: Any

    @property
    def nbytes(self) -> int:
        """The length of the sequence."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def read(self, start: int, out: torch.Tensor) -> None:
        """Copy bytes from `start` on to `out`, a flat tensor of bytes."""
        for piece, at in _pieces(self.tensors, start, out.numel()):
            out[at : at + piece.numel()].copy_(piece)

    def write(self, start: int, data: torch.Tensor) -> None:
        """Replace bytes from `start` on by `data`, a flat tensor of bytes."""
        for piece, at in _pieces(self.tensors, start, data.numel()):
            piece.copy_(data[at : at + piece.numel()])


def flatten(state: Any) -> FlatState:
    """Return a state dictionary as a sequence; its tensors are shared, not copied, if they are contiguous."""
    tensors: list[torch.Tensor] = []
    return FlatState(tensors, _describe(state, tensors))


def empty(described: Any) -> FlatState:
    """Return new tensors for a description, whose content is not defined."""
    shapes: dict[int, tuple[list[int], str]] = {}
    _find(described, shapes)
    tensors = [
        torch.empty(shape, dtype=getattr(torch, dtype)) for _, (shape, dtype) in sorted(shapes.items())
    ]
    return FlatState(tensors, described)


def restore_state(flat: FlatState) -> Any:
    """Return the state dictionary."""
    return _fill(flat.described, flat.tensors)


def bounds(nbytes: int, ranks: int, rank: int, first: int = 0) -> tuple[int, int]:
    """Return where a rank's part of a sequence begins and ends. The first `first` bytes are rank 0's."""
    shared = nbytes - first
    return (first + shared * rank // ranks if rank else 0), first + shared * (rank + 1) // ranks


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().contiguous())
        return (_TENSOR, len(tensors) - 1, list(value.shape), str(value.dtype).removeprefix("torch."))
    if isinstance(value, dict):
        return {key: _describe(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value) is tuple, [_describe(item, tensors) for item in value]]
    return value


def _find(described: Any, tensors: dict[int, tuple[list[int], str]]) -> None:
    if isinstance(described, tuple):
        _, number, shape, dtype = described
        tensors[number] = shape, dtype
    elif isinstance(described, dict):
        for item in described.values():
            _find(item, tensors)
    elif isinstance(described, list):
        for item in described[1]:
            _find(item, tensors)


def _fill(described: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(described, tuple):
        return tensors[described[1]]
    if isinstance(described, dict):
        return {key: _fill(item, tensors) for key, item in described.items()}
    if isinstance(described, list):
        items = [_fill(item, tensors) for item in described[1]]
        return tuple(items) if described[0] else items
    return described


def _pieces(tensors: Sequence[torch.Tensor], start: int, count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the parts of tensors in [start, start + count), as bytes, and where each is in that range."""
    at, stop = 0, start + count
    for tensor in tensors:
        low, high = max(at, start), min(at + tensor.nbytes, stop)
        if low < high:
            yield tensor.view(-1).view(torch.uint8)[low - at : high - at], low - start
        at += tensor.nbytes
