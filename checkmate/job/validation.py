"""Data of a YAML file against its class: every fault, with what would be right. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from checkmate.job.faults import Fault
from checkmate.job.faults import Path as YamlPath  # not that of schema, whose names are not looked up here
from checkmate.job.tofino import chips
from checkmate.wording import counted, did_you_mean

M = TypeVar("M")

FAULTS_MOST: Final = 200
"""Faults of a file's structure that are listed; the rest is counted."""
_SHOWN: Final = 100
"""Characters of a faulty value in a message."""
_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")
"""Of a key that a model or a dataclass does not have."""
_KINDS: Final[Mapping[str, str]] = {
    "string_type": "a text (in quotes if it looks like a number)",
    "string_too_short": "a text that is not empty",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "path_type": "the path of a file or folder",
    "tuple_type": "a list",
    "mapping_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
}
"""What a value must be, by the type of pydantic's error."""
_BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def adapter(model: Any) -> TypeAdapter[Any]:
    """Return what makes objects of a class of data, and data of objects."""
    return _adapter(model)  # apart, because mypy takes a class for something that `cache` refuses


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def of_data(model: type[M], data: Any) -> M:
    """Return the object of a file's data. Raise pydantic's `ValidationError` if its structure is faulty."""
    made: M = adapter(model).validate_python(data)
    return made


def data_of(thing: Any, **which: Any) -> Any:
    """Return an object as data that JSON can express. `which`: what to leave out, as pydantic names it."""
    return adapter(type(thing)).dump_python(thing, mode="json", **which)


def validated(
    model: type[M], raw: Any, words: Mapping[str, str] | None = None
) -> tuple[M | None, list[Fault]]:
    """Validate a file's structure. Return the model, or all faults; `words` has messages by error type."""
    try:
        return of_data(model, raw), []
    except ValidationError as error:
        found = error.errors()
        faulty = [e["loc"] for e in found]
        told = [e for e in found if not _follows(e, faulty)]
        listed = []
        keys_told = set[tuple[str | int, ...]]()
        for e in told[:FAULTS_MOST]:
            text = (words or {}).get(e["type"]) or _message(model, e, keys_told)
            listed.append(Fault(_location(e["loc"]), text))
        if more := len(told) - len(listed):
            listed.append(Fault((), f"has {counted(more, 'other fault')}; correct these first"))
        return None, listed


def _follows(error: Any, faulty: Sequence[tuple[str | int, ...]]) -> bool:
    """Return whether an error is consequential: pydantic does not count faulty items of a list."""
    loc = error["loc"]
    return error["type"] == "too_short" and any(f[: len(loc)] == loc and len(f) > len(loc) for f in faulty)


def _location(loc: tuple[str | int, ...]) -> YamlPath:
    """Return the path in the YAML, without pydantic's names of union members."""
    return tuple(part for part in loc if isinstance(part, int) or "[" not in part)


def _message(model: type, error: Any, keys_told: set[tuple[str | int, ...]]) -> str:
    """Return one of a `ValidationError`'s errors as a message with a correction.

    `keys_told`: the mappings whose keys a message has listed, to which this one may add its own.
    """
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "missing":
            return "is missing"
        case "too_short":
            return f"needs at least {context['min_length']}, has {context['actual_length']}"
        case "too_long":
            return f"may have at most {context['max_length']}, has {context['actual_length']}"
        case "string_pattern_mismatch" if context["pattern"] == chips.PORT_NAME:
            return 'must be a front-panel name such as "1/0": connector, then lane'
        case "string_pattern_mismatch":
            name = "a name of ASCII letters, digits, '_', '.' and '-', at most 63 long"
            return f"must be {name}, not {_shown(error)}"
        case "literal_error":
            return f"must be {context['expected']}, not {_shown(error)}"
        case "value_error":
            return str(context["error"])
        case _ if kind in _UNKNOWN:
            return _unknown_key(model, error["loc"], keys_told)
        case "model_type" | "model_attributes_type" | "dataclass_type":
            first, *more = _schema_at(model, error["loc"]).get("properties", {})
            such = f"{first}: and {more[0]}:" if more else f"{first}:"
            return f"must be a mapping of keys such as {such}, not {_shown(error)}"
        case _ if kind.startswith("int_"):
            return f"must be a whole number{_range(model, error['loc'])}, not {_shown(error)}"
        case _ if kind in _BOUNDS:
            name, words = _BOUNDS[kind]
            within = _range(model, error["loc"]).replace(" from", "from", 1)
            return f"must be {within or f'{words} {context[name]:g}'}, not {_shown(error)}"
        case _ if kind in _KINDS:
            return f"must be {_KINDS[kind]}, not {_shown(error)}"
        case _:
            return f"cannot be {_shown(error)}: {error['msg']}"


def _shown(error: Any) -> str:
    value = error["input"]
    text = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
    text = {"None": "empty", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _unknown_key(model: type, loc: tuple[str | int, ...], keys_told: set[tuple[str | int, ...]]) -> str:
    """Return what a key may have meant, or else, once, the keys that there are."""
    known = list(_schema_at(model, loc[:-1]).get("properties", {}))
    if suggested := did_you_mean(str(loc[-1]), known):
        return f"unknown key{suggested}"
    if loc[:-1] in keys_told:
        return "unknown key"
    keys_told.add(loc[:-1])
    return f"unknown key; the keys here are {', '.join(known)}"


def _range(model: type, loc: tuple[str | int, ...]) -> str:
    """Return ` from 1 to 8` for a number at a path, or an empty text if its model has no bounds."""
    at = _schema_at(model, loc)
    least, below = at.get("minimum"), at.get("exclusiveMaximum")
    most = at.get("maximum") if below is None else below - 1
    return "" if least is None or most is None else f" from {least} to {most}"


def _schema_at(model: type, loc: tuple[str | int, ...]) -> dict[str, Any]:
    """Return the JSON Schema of the value at a path, the first of an optional one's."""
    schema = _json_schema(model)
    at: dict[str, Any] = schema
    for part in _location(loc):
        if isinstance(part, int):
            at = dict(enumerate(at.get("prefixItems", ()))).get(part) or at.get("items", {})
        else:
            at = at.get("properties", {}).get(part) or next(
                iter(at.get("patternProperties", {}).values()), {}
            )
        at = at.get("anyOf", [at])[0]  # the type of an optional field
        at = schema["$defs"][at["$ref"].rpartition("/")[2]] if "$ref" in at else at
    return at


@cache
def _json_schema(model: type) -> dict[str, Any]:
    return adapter(model).json_schema()
