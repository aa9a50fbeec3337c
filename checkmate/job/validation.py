"""Data of a YAML file against its class: every fault, with what would be right. Pure.

If there are faults, checks between parts use those parts that are valid (`parts`), so that a fault in one key
does not hide a fault in another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from ipaddress import IPv4Address
from typing import Any, Final, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from checkmate.base.wording import counted, did_you_mean
from checkmate.job.addresses import records_beside
from checkmate.job.faults import Fault, Path
from checkmate.job.faults import Path as YamlPath  # not that of schema, whose names are not looked up here
from checkmate.job.fields import Ip
from checkmate.job.tofino import chips

M = TypeVar("M")

FAULTS_MOST: Final = 200
"""Faults of a file's structure that are listed; the rest is counted."""
MAX_SHOWN: Final = 100
"""Characters of a faulty value in a message."""
_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")
"""Of a key that a model or a dataclass does not have."""
_KINDS: Final[Mapping[str, str]] = {
    "string_type": "a text (in quotes if it looks like a number)",
    "string_too_short": "a text that is not empty",
    "bool_type": "true or false",
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
    thing: M = adapter(model).validate_python(data)
    return thing


def data_of(thing: Any, **options: Any) -> Any:
    """Return an object as data that JSON can express. `options`: what to leave out, as pydantic names it."""
    return adapter(type(thing)).dump_python(thing, mode="json", **options)


def validated(
    model: type[M], raw: Any, words: Mapping[str, str] | None = None
) -> tuple[M | None, list[Fault]]:
    """Validate a file's structure. Return the model, or all faults; `words` has messages by error type."""
    try:
        return of_data(model, raw), []
    except ValidationError as error:
        errors = error.errors()
        faulty = [e["loc"] for e in errors]
        independent = [e for e in errors if not _follows(e, faulty)]
        faults = []
        keys_told = set[tuple[str | int, ...]]()
        for e in independent[:FAULTS_MOST]:
            text = (words or {}).get(e["type"]) or _message(model, e, keys_told)
            faults.append(Fault(_location(e["loc"]), text))
        if more := len(independent) - len(faults):
            faults.append(Fault((), f"has {counted(more, 'other fault')}; correct these first"))
        return None, faults


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
            return f"must be {name}, not {_as_shown(error)}"
        case "literal_error":
            return f"must be {context['expected']}, not {_as_shown(error)}"
        case "value_error":
            return str(context["error"])
        case _ if kind in _UNKNOWN:
            return _unknown_key(model, error["loc"], keys_told)
        case "model_type" | "model_attributes_type" | "dataclass_type":
            first, *more = _schema_at(model, error["loc"]).get("properties", {})
            such = f"{first}: and {more[0]}:" if more else f"{first}:"
            return f"must be a mapping of keys such as {such}, not {_as_shown(error)}"
        case _ if kind.startswith("int_"):
            return f"must be a whole number{_range(model, error['loc'])}, not {_as_shown(error)}"
        case _ if kind in _BOUNDS:
            name, words = _BOUNDS[kind]
            within = _range(model, error["loc"]).replace(" from", "from", 1)
            return f"must be {within or f'{words} {context[name]:g}'}, not {_as_shown(error)}"
        case _ if kind in _KINDS:
            return f"must be {_KINDS[kind]}, not {_as_shown(error)}"
        case _:
            return f"cannot be {_as_shown(error)}: {error['msg']}"


def _as_shown(error: Any) -> str:
    value = error["input"]
    text = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
    text = {"None": "empty", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _unknown_key(model: type, loc: tuple[str | int, ...], keys_told: set[tuple[str | int, ...]]) -> str:
    """Return what a key may have meant, or else, once, the keys that there are."""
    keys = list(_schema_at(model, loc[:-1]).get("properties", {}))
    if suggested := did_you_mean(str(loc[-1]), keys):
        return f"unknown key{suggested}"
    if loc[:-1] in keys_told:
        return "unknown key"
    keys_told.add(loc[:-1])
    return f"unknown key; the keys here are {', '.join(keys)}"


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


_IP: TypeAdapter[IPv4Address] = TypeAdapter(Ip)
_PLAIN: Final = (str, int, float, bool)
"""Of values that can't change."""


@dataclass(frozen=True)
class ValidPart:
    """A mapping in the YAML: its path, the valid fields of its model, and all of it as read."""

    path: Path
    fields: Mapping[str, Any]
    raw: Any

    def get(self, *names: str) -> tuple[Any, ...] | None:
        """Return the values of all these fields, or `None` if one is missing or faulty."""
        if any(name not in self.fields for name in names):
            return None
        return tuple(self.fields[name] for name in names)


def parts(raw: Any, model: type, *keys: str) -> list[ValidPart]:
    """Return the parts at `keys` of a YAML's data, for a model. Lists on the way are expanded."""
    return list(_walk(raw, model, keys, ()))


def _walk(raw: Any, model: type, keys: Sequence[str], path: Path) -> Iterator[ValidPart]:
    if isinstance(raw, list):
        for index, item in enumerate(raw):
            yield from _walk(item, model, keys, (*path, index))
    elif keys:
        if isinstance(raw, dict) and keys[0] in raw:
            yield from _walk(raw[keys[0]], model, keys[1:], (*path, keys[0]))
    else:
        yield ValidPart(path, _sound(raw, model) if isinstance(raw, dict) else {}, raw)


def _sound(raw: Mapping[Any, Any], model: type) -> dict[str, Any]:
    sound = {}
    for name, required, default in _fields(model):
        if name in raw:
            value = raw[name]
            validate = _valid if value is None or isinstance(value, _PLAIN) else _valid.__wrapped__
            try:
                sound[name] = validate(model, name, value)
            except ValidationError:
                continue  # reported with the file's structure
        elif not required:
            sound[name] = default
    return sound


@cache
def _fields(model: type) -> list[tuple[str, bool, Any]]:
    """Return the name of each field, whether it is required, and its default."""
    defaults = [(spec.name, _default(spec)) for spec in dataclasses.fields(model)]
    return [(name, default is dataclasses.MISSING, default) for name, default in defaults]


def _default(spec: dataclasses.Field[Any]) -> Any:
    """Return the default of a field of a part of a file; `dataclasses.MISSING` if it is required."""
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


@lru_cache(1 << 16, typed=True)  # several checks need the same addresses, and true is not 1
def _valid(model: type, name: str, value: Any) -> Any:
    """Return a field's value. Raise `ValidationError` if it is faulty."""
    return field_adapter(model, name).validate_python(value)


@cache
def field_adapter(model: type, name: str) -> TypeAdapter[Any]:
    """Return what checks the value of a field of a part of a file."""
    return TypeAdapter(_types(model)[name])


@cache
def _types(model: type) -> dict[str, Any]:
    """Return the type of each field. To look up one takes as long as to look up all."""
    return get_type_hints(model, include_extras=True)


def addresses_of(host: ValidPart) -> Iterator[tuple[Path, IPv4Address]]:
    """Yield the valid IP addresses of a host or stub, each with its path."""
    if (ip := host.get("ip")) is not None:
        yield (*host.path, "ip"), ip[0]
    more = host.raw.get("addresses") if isinstance(host.raw, dict) else None
    for index, address in enumerate(more if isinstance(more, list) else ()):
        try:
            yield (*host.path, "addresses", index), _IP.validate_python(address)
        except ValidationError:
            continue  # reported with the file's structure


def served_at(node: ValidPart) -> Iterator[tuple[str, str]]:
    """Yield the addresses at which a shadow node serves, each with the key that specifies it.

    The default for step records is the port after that of `mgmt`, which may not exist.
    """
    if (mgmt := node.get("mgmt")) is not None:
        yield "mgmt", mgmt[0]
        if node.fields.get("records", "") is None:  # not given; "" if faulty
            host, _, _ = mgmt[0].rpartition(":")
            yield "mgmt", f"{host}:{records_beside(mgmt[0])[1]}"
    if (records := node.fields.get("records")) is not None:
        yield "records", records
