"""A checked job as JSON, and back, without a check. Pure.

Each object of JSON has one key, which says what its value is: `{"Stub": [{"ip": 167772161}, "02:...", 7010]}`
has the values of a stub's fields, in order. Nothing else than what a job consists of can be made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from checkmate.job import schema
from checkmate.job.schema import Frozen, Job


def to_json(job: Job) -> str:
    """Return a job as JSON."""
    return json.dumps(_plain(job), separators=(",", ":"))


def of_json(text: str | bytes) -> Job:
    """Return the job of `to_json`. Raise `ValueError` if it is something else."""
    try:
        found = json.loads(text, object_hook=_made)
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a job: {error!r}") from None
    if not isinstance(found, Job):
        raise ValueError("not a job")
    return found


def _plain(value: Any) -> Any:
    match value:
        case IPv4Address():
            return {"ip": int(value)}
        case Path():
            return {"path": str(value)}
        case tuple():
            return {"tuple": [_plain(one) for one in value]}
        case Mapping():
            return {"map": [[key, _plain(one)] for key, one in value.items()]}
        case Frozen():
            return {type(value).__name__: [_plain(getattr(value, name)) for name in _NAMES[type(value)]]}
        case _:
            return value


def _object(kind: type, values: Any) -> Any:
    """Return an object of a part of a file, without its constructor, which would be slower."""
    made: Any = object.__new__(kind)
    made.__dict__.update(zip(_NAMES[kind], values, strict=True))
    return made


def _made(found: Any) -> Any:
    ((what, value),) = found.items()
    return _MAKERS[what](value)


_PARTS: Final = [one for one in vars(schema).values() if is_dataclass(one) and isinstance(one, type)]
_NAMES: Final[Mapping[type, list[str]]] = {kind: [one.name for one in fields(kind)] for kind in _PARTS}
_MAKERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "ip": IPv4Address,
    "map": dict,
    "path": Path,
    "tuple": tuple,
    **{kind.__name__: partial(_object, kind) for kind in _PARTS},
}
