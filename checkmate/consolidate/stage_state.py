"""Makes the state of a stage from its DP groups, with whole tensors in place of chunks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from checkmate import state
from checkmate.consolidate.chunks import Box, Cover, Select, equal_values, everything
from checkmate.consolidate.snapshot import GroupState
from checkmate.nodes.reader import States
from checkmate.optim.supported import kind_of
from checkmate.wire.layout import Layout
from checkmate.wire.parameter import Parameter

T = TypeVar("T")


@dataclass(frozen=True)
class StageState:
    """The state of one stage, with whole tensors that have the script's shapes."""

    names: tuple[str, ...]
    """The names of the trained parameters, by number."""
    states: States
    beside: Mapping[str, torch.Tensor]
    """Buffers, frozen parameters, and the optimizer's state of these; each as the first DP group has it."""
    buffers: Mapping[int, Mapping[str, torch.Tensor]]
    """Those of each DP group's first rank."""


def assemble_stage(members: Mapping[int, GroupState], select: Select = everything) -> StageState:
    """Assemble a stage of these DP groups. If it has several, chunks are removed from them as they are used.

    Args:
        members: The groups' states. They may lack chunks without a part of what is selected.
        select: Returns the part of a parameter that is wanted, by `("model", name)`, and of a frozen one, by
            `("buffers", name)`. Its optimizer state is cut like it.

    Raises:
        StateError: The groups have different parameters or state, or chunks are missing or overlap.
    """
    first, *_ = members
    names = tuple(parameter.name for parameter in members[first].layout.parameters)
    for group, member in members.items():
        if tuple(parameter.name for parameter in member.layout.parameters) != names:
            raise state.StateError(
                f"DP groups {first} and {group} are of one stage, but have other parameters"
            )
        if _grouped(member) != _grouped(members[first]):
            raise state.StateError(f"DP groups {first} and {group} have other optimizers or parameter groups")
    states = {number: _trained(members, number, select) for number in range(len(names))}
    loaded = {
        group: {name: state.loads(data) for name, data in member.record.buffers.items()}
        for group, member in members.items()
    }
    buffers = {group: _buffers(member, loaded[group]) for group, member in members.items()}
    return StageState(names, states, _beside(members, loaded, select), buffers)


def needed_numbers(layouts: Mapping[int, Layout], select: Select) -> dict[int, list[int]]:
    """Return the parameters whose chunks are needed for what is selected, by DP group of a stage."""
    result: dict[int, list[int]] = {group: [] for group in layouts}
    first, *_ = layouts.values()
    for number, parameter in enumerate(first.trained):
        chunks = {
            group: layout.parameters[number]
            for group, layout in layouts.items()
            if number < len(layout.parameters) and number in layout.own_numbers
        }
        if not chunks:
            continue
        cover = _cover(chunks)
        part = select(("model", parameter.name), cover.whole)
        for group in chunks if part is None else cover.needed_for(part):
            result[group].append(number)
    return result


def _grouped(member: GroupState) -> object:
    spec = member.optimizer
    return [(kind_of(spec, group), list(group.parameters)) for group in spec.groups]


def _trained(
    members: Mapping[int, GroupState], number: int, select: Select
) -> tuple[torch.Tensor, dict[str, object]]:
    """Return a parameter and its optimizer state, or the part that is selected."""
    chunks, tensors, states = {}, {}, {}
    for group, member in members.items():
        parameter = member.layout.parameters[number]
        if number not in member.layout.own_numbers:  # it is of another share
            continue
        chunks[group] = parameter
        if number not in member.states:  # nothing of it is selected
            continue
        parts = member.states.pop(number) if len(members) > 1 else member.states[number]
        tensors[group], states[group] = state.from_held(parameter, *parts)
    name = parameter.name
    if not chunks:
        raise state.StateError(f"no DP group has the share of the model to which {name} belongs")
    cover = _cover(chunks)
    part = select(("model", name), cover.whole)
    return cover.assemble(name, tensors, part), _entries(name, cover, tensors, states, part)


def _cover(chunks: Mapping[int, Parameter]) -> Cover:
    first, *_ = chunks.values()
    whole = first.whole or first.shape
    for group, parameter in chunks.items():
        if (parameter.whole or parameter.shape) != whole:
            shape = list(parameter.whole or parameter.shape)
            raise state.StateError(f"{parameter.name} is {list(whole)}, but {shape} in DP group {group}")
    boxes = {group: Box.of(chunk) for group, chunk in chunks.items()}
    return Cover(first.name, whole, boxes)


def _entries(
    name: str,
    cover: Cover,
    chunks: Mapping[int, torch.Tensor],
    states: Mapping[int, Mapping[str, object]],
    part: Box | None,
) -> dict[str, object]:
    """Return a parameter's optimizer state. What does not have its shape must be the same in all groups.

    Empty chunks have no state of their own if there are others.
    """
    full = {group: entries for group, entries in states.items() if chunks[group].numel()} or states
    first, *_ = full
    result: dict[str, object] = {}
    for entry in full[first]:
        description = f"{entry} of {name}"
        values = {group: entries.get(entry) for group, entries in full.items()}
        tensors = {g: v for g, v in values.items() if isinstance(v, torch.Tensor)}
        if len(tensors) == len(full) and all(t.shape == chunks[g].shape for g, t in tensors.items()):
            result[entry] = cover.assemble(description, tensors, part)
        else:
            result[entry] = _common(description, values)
    for group, entries in full.items():
        if entries.keys() != result.keys():
            raise state.StateError(f"{name} has other optimizer state in DP group {first} than in {group}")
    return result


def _common(description: str, values: Mapping[int, T]) -> T:
    """Return a value that all groups have."""
    (first, first_value), *rest = values.items()
    for group, value in rest:
        if not equal_values(first_value, value):
            raise state.StateError(
                f"{description} is another one in DP group {first} than in DP group {group}"
            )
    return first_value


def _buffers(member: GroupState, loaded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a group's buffers, without chunks of frozen parameters and their optimizer state."""
    frozen = {parameter.name for parameter in member.layout.frozen}
    return {
        name: tensor for name, tensor in loaded.items() if not (name in frozen or state.is_frozen_state(name))
    }


def _beside(
    members: Mapping[int, GroupState], loaded: Mapping[int, Mapping[str, torch.Tensor]], select: Select
) -> dict[str, torch.Tensor]:
    """Return buffers, frozen parameters and their optimizer state. Buffers are those of the first group.

    `loaded` is what each group's record has of these.
    """
    first, *_ = members
    chunks = {
        frozen.name: {group: _frozen(member, frozen.name) for group, member in members.items()}
        for frozen in members[first].layout.frozen
    }
    covers = {name: _cover(result) for name, result in chunks.items()}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in loaded[first].items():
        values = {group: tensors[name] for group, tensors in loaded.items() if name in tensors}
        if name in covers and len(values) == len(members):  # else a chunk was too large for the records
            part = select(("buffers", name), covers[name].whole)
            result[name] = covers[name].assemble(name, values, part)
        elif state.is_frozen_state(name):
            parameter = state.frozen_parameter(name)
            if parameter in chunks and _shapes(values) == _shapes(chunks[parameter]):
                part = select(("buffers", parameter), covers[parameter].whole)
                result[name] = covers[parameter].assemble(name, values, part)
            else:
                value = _common(name, values)
                is_whole = parameter in loaded[first] and value.shape == loaded[first][parameter].shape
                result[name] = _selected(parameter, value, select) if is_whole else value
        elif name not in covers:
            result[name] = _selected(name, tensor, select)
    return result


def _selected(name: str, tensor: torch.Tensor, select: Select) -> torch.Tensor:
    """Return what is selected of a buffer or a frozen parameter that no group has in chunks."""
    part = select(("buffers", name), tensor.shape)
    return tensor if part is None else tensor[part.slices]


def _frozen(member: GroupState, name: str) -> Parameter:
    """Return a group's chunk of a frozen parameter."""
    parameter = next((candidate for candidate in member.layout.frozen if candidate.name == name), None)
    if parameter is None:
        raise state.StateError(f"{name} is not frozen in all DP groups of its stage")
    return parameter


def _shapes(chunks: Mapping[int, Parameter] | Mapping[int, torch.Tensor]) -> object:
    return {group: tuple(chunk.shape) for group, chunk in chunks.items()}
