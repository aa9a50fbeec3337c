"""Fills new holds with what the node has of former ranks, so that nothing of it crosses the network.

A parameter is filled if the chunks of former holds on this node contain all of it. Trainers seed the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from checkmate import state
from checkmate.consolidate.chunks import Box, copy_common, equal_values
from checkmate.shadow.logic.group import Former, source_of
from checkmate.shadow.logic.hold import Hold
from checkmate.shadow.replica.replica import Replica
from checkmate.shadow.resources import HoldResources
from checkmate.wire.layout import Layout
from checkmate.wire.parameter import Parameter

LOT_BYTES: Final = 4 << 20
"""Bytes of parameters that are loaded at a time, because a step may wait for the lock."""

Values = tuple[torch.Tensor, dict[str, object]]


class FormerChunk(NamedTuple):
    """A chunk of a parameter in a former hold."""

    parameter: Parameter
    number: int
    replica: Replica

    def read(self, iteration: int) -> Values:
        """Return its state, with the script's order of dimensions. It is valid until the next one is read."""
        ((_, tensor, values),) = self.replica.read(iteration, [self.number])
        return state.from_held(self.parameter, tensor, values)


@dataclass(frozen=True)
class FormerState:
    """The state of former ranks on a node, after one iteration."""

    iteration: int
    chunks: Mapping[tuple[str, str], Sequence[FormerChunk]]
    """By name, and the name of the optimizer's entry if that is copied."""

    @classmethod
    def of(
        cls,
        former: Former | None,
        resources: Mapping[Hold, HoldResources],
        iteration: int,
        source: bytes,
        numbers: Collection[int],
    ) -> FormerState:
        """Return what former ranks have left of an iteration that belongs to the start `source`.

        `numbers`: their DP groups of one pipeline stage, because another one may have the same names.
        """
        chunks: dict[tuple[str, str], list[FormerChunk]] = {}
        groups = {} if former is None else former.groups
        for group in [group for number, group in groups.items() if number in numbers]:
            for hold in group.holds if source_of(group.begin, iteration) == source else ():
                if not hold.seeded or hold.doubtful or hold.stepped != iteration:
                    continue
                replica = resources[hold].replica
                for number in hold.parameters:
                    parameter = group.layout.parameters[number]
                    key = (parameter.name, parameter.state)
                    chunks.setdefault(key, []).append(FormerChunk(parameter, number, replica))
        return cls(iteration, chunks)

    def covered(self, layout: Layout, numbers: Sequence[int]) -> list[int]:
        """Return those of a layout's parameters of which all is there."""
        return [number for number in numbers if self._chunks_of(layout.parameters[number])]

    def fill(self, layout: Layout, numbers: Sequence[int]) -> Iterator[dict[int, Values]]:
        """Yield covered parameters and their optimizer state, as a node holds them, some at a time.

        Raise `StateError` if chunks of one differ in what they have in common.
        """
        lot, nbytes = dict[int, Values](), 0
        for number in numbers:
            parameter = layout.parameters[number]
            chunks = self._chunks_of(parameter)
            lot[number] = state.to_held(parameter, *_assembled(parameter, chunks, self.iteration))
            nbytes += lot[number][0].nbytes
            if nbytes >= LOT_BYTES:
                yield lot
                lot, nbytes = {}, 0
        yield lot

    def _chunks_of(self, parameter: Parameter) -> list[FormerChunk]:
        """Return chunks that contain all of a parameter, each element once; none if there are none."""
        box, whole = Box.of(parameter), parameter.whole or parameter.shape
        places: dict[Box, FormerChunk] = {}
        for chunk in self.chunks.get((parameter.name, parameter.state), ()):
            same = (chunk.parameter.whole or chunk.parameter.shape) == whole
            if same and chunk.parameter.dtype == parameter.dtype:
                places.setdefault(Box.of(chunk.parameter), chunk)
        common = {place: part for place in places if (part := place.common(box)) is not None}
        is_covered = box.elements and sum(part.elements for part in common.values()) == box.elements
        return [places[place] for place in common] if is_covered else []


def _assembled(parameter: Parameter, chunks: Sequence[FormerChunk], iteration: int) -> Values:
    """Return a parameter and its optimizer state, of the chunks that contain it."""
    part = Box.of(parameter)
    result: torch.Tensor | None = None
    entries: dict[str, object] = {}
    for chunk in chunks:
        tensor, values = chunk.read(iteration)
        box = Box.of(chunk.parameter)
        if result is None:
            result = tensor.new_empty(part.shape)
        copy_common(tensor, box, result, part)
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                if name not in entries:
                    entries[name] = value.new_empty(part.shape)
                entry = entries[name]
                assert isinstance(entry, torch.Tensor)
                copy_common(value, box, entry, part)
            elif not equal_values(entries.setdefault(name, _copy_of(value)), value):
                raise state.StateError(f"{name} of {parameter.name} differs between its chunks")
    assert result is not None
    return result, entries


def _copy_of(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
