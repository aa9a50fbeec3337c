"""Nested optimizer state as named leaves, and back. Pure.

A parameter's state may have lists, dictionaries and tensors that consist of others, such as quantised ones. A
leaf's name has the way to it: `exp_avg`, `GG[0]`, `factors.row`, `exp_avg:codes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from checkmate.state.plain import dumps
from checkmate.state.tensors import StateError, local_of

_STEP: Final = re.compile(r"\[(\d+)\]|([.:])([^.:\[\]]*)")
_FIRST: Final = re.compile(r"[^.:\[\]]*")
MAX_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, or another value without parts, in nested state."""

    name: str
    value: Any
    """Of a DTensor, this rank's part."""
    holder: Any
    """The list or dictionary that has it; `None` for a part of a tensor."""
    key: Any
    """Its key in the holder."""

    def replace(self, value: object) -> None:
        """Put another value in its place. Raise `StateError` if it has none that can be set."""
        try:
            self.holder[self.key] = value
        except TypeError:
            raise StateError(f"{self.name} of the optimizer state can't be replaced") from None

    def remove(self) -> None:
        """Take it out of the dictionary that has it. Raise `StateError` if another kind of thing has it."""
        if not isinstance(self.holder, MutableMapping):
            raise StateError(f"{self.name} of the optimizer state can't be removed")
        self.holder.pop(self.key, None)


def leaves(entries: Mapping[Any, Any]) -> Iterator[Leaf]:
    """Yield the leaves of a parameter's state, in order."""
    for key, value in entries.items():
        yield from _leaves(_named(key), value, entries, key, 1)


def _leaves(name: str, value: Any, holder: Any, key: Any, depth: int) -> Iterator[Leaf]:
    if depth > MAX_DEPTH:
        raise StateError(f"{name} of the optimizer state is nested in more than {MAX_DEPTH} others")
    if isinstance(value, torch.Tensor):
        local = local_of(value)
        if type(local) in (torch.Tensor, torch.nn.Parameter) or not hasattr(local, "__tensor_flatten__"):
            yield Leaf(name, local, holder, key)
            return
        for part in local.__tensor_flatten__()[0]:
            yield from _leaves(f"{name}:{part}", getattr(local, part), None, part, depth + 1)
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _leaves(f"{name}.{_named(inner)}", item, value, inner, depth + 1)
    elif isinstance(value, list | tuple) and any(_has_parts(item) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}[{number}]", item, value, number, depth + 1)
    else:
        try:
            dumps(value)
        except StateError as error:
            raise StateError(f"{name} of the optimizer state: {error}") from None
        yield Leaf(name, value, holder, key)


def _has_parts(value: object) -> bool:
    return isinstance(value, torch.Tensor | Mapping | list | tuple)


def _named(key: object) -> str:
    """Return a key as a part of a name, in which no sign separates parts."""
    return re.sub(r"[.:\[\]]", "_", str(key))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return leaves, by name, as nested state: dictionaries, and lists where names have numbers.

    What a tensor consists of becomes a dictionary of its parts. Raise `StateError` if a name is malformed.
    """
    root: dict[str, Any] = {}
    for name, value in values.items():
        first = _FIRST.match(name)
        assert first is not None
        keys: list[str | int] = [first.group()]
        at = first.end()
        while at < len(name):
            step = _STEP.match(name, at)
            if step is None or len(keys) > MAX_DEPTH:
                raise StateError(f"{name[:80]} is not a name of optimizer state")
            keys.append(int(step.group(1)) if step.group(1) else step.group(3))
            at = step.end()
        holder: dict[Any, Any] = root
        for key in keys[:-1]:
            holder = holder.setdefault(key, {})
            if not isinstance(holder, dict):
                raise StateError(f"{name[:80]} of the optimizer state is within what has no parts")
        holder[keys[-1]] = value
    return {name: _with_lists(value) for name, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Return a value with lists in place of dictionaries whose keys are numbers from 0 on."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return [items[key] for key in range(len(items))] if items.keys() == {*range(len(items))} else items
