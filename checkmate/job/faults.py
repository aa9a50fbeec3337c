"""The parts of a job's YAML, as far as they are sound, each with its path; and what a fault is.

Checks between parts work on these, so a fault in one key hides no fault in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from checkmate.job.schema import records_beside

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where (a path into the YAML) and what would be right."""

    path: Path
    message: str


@dataclass(frozen=True)
class Part:
    """A mapping in the YAML: its path, and those of its model's fields that are sound."""

    path: Path
    fields: Mapping[str, Any]

    def get(self, *names: str) -> tuple[Any, ...] | None:
        """The values of all these fields; `None` where one is missing or has a fault."""
        if any(name not in self.fields for name in names):
            return None
        return tuple(self.fields[name] for name in names)


def show_path(path: Path) -> str:
    """`dp_groups[0].ranks[1].ip`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(top level)"


def parts(raw: Any, model: type[BaseModel], *keys: str) -> list[Part]:
    """What stands at `keys` of a YAML's data, as parts of a model. Lists on the way are walked."""
    return list(_walk(raw, model, keys, ()))


def _walk(raw: Any, model: type[BaseModel], keys: Sequence[str], path: Path) -> Iterator[Part]:
    if isinstance(raw, list):
        for index, item in enumerate(raw):
            yield from _walk(item, model, keys, (*path, index))
    elif keys:
        if isinstance(raw, dict) and keys[0] in raw:
            yield from _walk(raw[keys[0]], model, keys[1:], (*path, keys[0]))
    else:
        yield Part(path, _sound(raw, model) if isinstance(raw, dict) else {})


def _sound(raw: Mapping[Any, Any], model: type[BaseModel]) -> dict[str, Any]:
    found = {}
    for name, info in model.model_fields.items():
        if name in raw:
            try:
                found[name] = _adapter(model, name).validate_python(raw[name])
            except ValidationError:
                continue  # reported with the file's structure
        elif not info.is_required():
            found[name] = info.get_default(call_default_factory=True)
    return found


@cache
def _adapter(model: type[BaseModel], name: str) -> TypeAdapter[Any]:
    info = model.model_fields[name]
    kind: Any = info.annotation
    for constraint in info.metadata:
        kind = Annotated[kind, constraint]
    return TypeAdapter(kind)


def served_at(node: Part) -> Iterator[tuple[str, str]]:
    """Yield the addresses at which a shadow node serves, each with the key that says it.

    For step records that is by default the port after the one of `mgmt`, which need not exist.
    """
    if (mgmt := node.get("mgmt")) is not None:
        yield "mgmt", mgmt[0]
        if node.fields.get("records", "") is None:  # not given; one with a fault says nothing
            host, _, _ = mgmt[0].rpartition(":")
            yield "mgmt", f"{host}:{records_beside(mgmt[0])[1]}"
    if (records := node.fields.get("records")) is not None:
        yield "records", records
