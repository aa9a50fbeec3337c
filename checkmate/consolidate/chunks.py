"""Assembles whole tensors from chunks, which are boxes, some of which several DP groups may have. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from checkmate.state import StateError, dumps
from checkmate.wire.parameter import Parameter

_MAX_SHOWN: Final = 3
"""The number of chunks that a message shows."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins and how large it is, in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Parameter) -> Box:
        """Return a chunk's place in its whole parameter."""
        return cls(parameter.offset or (0,) * len(parameter.shape), parameter.shape)

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The indices that select it in the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.shape, strict=True))

    def common(self, second: Box) -> Box | None:
        """Return what two boxes of a tensor have in common, or `None` if that is nothing."""
        start = tuple(max(pair) for pair in zip(self.offset, second.offset, strict=True))
        ends = (
            min(at + size, other_at + other_size)
            for at, size, other_at, other_size in zip(
                self.offset, self.shape, second.offset, second.shape, strict=True
            )
        )
        shape = tuple(end - at for at, end in zip(start, ends, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> Box:
        """Return where it is in another box that contains it."""
        offset = tuple(at - outer_at for at, outer_at in zip(self.offset, outer.offset, strict=True))
        return Box(offset, self.shape)

    def __str__(self) -> str:
        return f"{list(self.shape)} at {list(self.offset)}"


Select = Callable[[Sequence[object], Sequence[int]], Box | None]
"""Returns the box to read of a tensor with these keys and this shape; `None` for all of it."""


def everything(path: Sequence[object], shape: Sequence[int]) -> Box | None:
    """Select all of each tensor."""
    return None


class Cover:
    """Boxes that together are a whole tensor, each element once; several DP groups may have the same box."""

    def __init__(self, name: str, whole: Sequence[int], boxes: Mapping[int, Box]) -> None:
        """Check the boxes.

        Args:
            name: The tensor's name in messages.
            whole: The shape of the whole tensor.
            boxes: The box of each DP group.

        Raises:
            StateError: A box is outside of the tensor, a part is missing, or boxes overlap but are not equal.
        """
        self.whole = tuple(whole)
        self._name, self._boxes = name, dict(boxes)
        self._first: dict[Box, int] = {}
        for group, box in boxes.items():
            self._check_within(group, box)
            if box.elements:
                self._first.setdefault(box, group)
        self._check_overlaps()
        covered = sum(box.elements for box in self._first)
        if covered != math.prod(self.whole):
            raise StateError(
                f"{name}: a chunk is missing: DP groups have {covered:,} of the {math.prod(self.whole):,} "
                f"elements of {list(self.whole)}: {self._describe()}"
            )

    def needed_for(self, part: Box) -> set[int]:
        """Return the DP groups whose chunks are needed for a part of the tensor; one, if it is empty."""
        groups = {group for box, group in self._first.items() if box.common(part) is not None}
        return groups or set([*self._first.values(), *self._boxes][:1])

    def assemble(
        self, tensor_name: str, tensors: Mapping[int, torch.Tensor], part: Box | None = None
    ) -> torch.Tensor:
        """Return the whole tensor, which is the chunk itself if there is only one, or a part of it.

        Args:
            tensor_name: The tensor's name in messages.
            tensors: The chunk of each DP group; for a part, of those that are needed.
            part: The part; `None` for all.

        Raises:
            StateError: DP groups have another type, or other bits of the same chunk.
        """
        types = {tensor.dtype for tensor in tensors.values()}
        if len(types) > 1:
            raise StateError(f"{tensor_name} has different types: {', '.join(sorted(map(str, types)))}")
        for group, tensor in tensors.items():
            box = self._boxes[group]
            first = self._first.get(box, group)
            if first != group and first in tensors and not equal_bits(tensor, tensors[first]):
                raise StateError(
                    f"{tensor_name}: DP groups {first} and {group} have the same chunk, {box}, but other "
                    "values; if these are stages of a pipeline, give the job a mesh with pp"
                )
        if len(self._first) == 1:
            tensor = tensors[next(iter(self._first.values()))]
            return tensor if part is None else tensor[part.slices]
        part = part or Box((0,) * len(self.whole), self.whole)
        result = torch.empty(part.shape, dtype=types.pop())
        for group in self.needed_for(part):
            copy_common(tensors[group], self._boxes[group], result, part)
        return result

    def _check_within(self, group: int, box: Box) -> None:
        sizes = zip(box.offset, box.shape, self.whole, strict=False)
        is_inside = len(box.offset) == len(box.shape) == len(self.whole)
        if not is_inside or not all(0 <= offset <= offset + size <= limit for offset, size, limit in sizes):
            raise StateError(
                f"{self._name}: the chunk of DP group {group}, {box}, is not within {list(self.whole)}"
            )

    def _check_overlaps(self) -> None:
        """Raise `StateError` if two boxes have some elements in common."""
        boxes = list(self._first)
        if len(boxes) < 2 or not self.whole:
            return
        start = np.array([box.offset for box in boxes])
        stop = start + np.array([box.shape for box in boxes])
        for number, box in enumerate(boxes):
            common = (start[number] < stop[:number]) & (start[:number] < stop[number])
            for index in np.flatnonzero(common.all(axis=1)):
                earlier_group, group = self._first[boxes[int(index)]], self._first[box]
                raise StateError(
                    f"{self._name}: the chunk of DP group {group}, {box}, overlaps that of DP group "
                    f"{earlier_group}, {boxes[int(index)]}"
                )

    def _describe(self) -> str:
        texts = [f"{box} in DP group {group}" for box, group in self._first.items()]
        more = f" and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
        return (", ".join(texts[:_MAX_SHOWN]) or "none") + more


def copy_common(source: torch.Tensor, box: Box, target: torch.Tensor, part: Box) -> None:
    """Copy from the elements of one box of a tensor to those of another what both have in common."""
    if (common := box.common(part)) is not None:
        target[common.within(part).slices].copy_(source[common.within(box).slices])


def equal_values(first: object, second: object) -> bool:
    """Return whether two values of optimizer state are equal, tensors by their bits."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return equal_bits(first, second)
    if isinstance(first, list | dict):  # of nested state
        return type(first) is type(second) and dumps(first) == dumps(second)
    return type(first) is type(second) and first == second


def equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, type and bits."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    first_bytes, second_bytes = (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)
    )
    return torch.equal(first_bytes, second_bytes)
