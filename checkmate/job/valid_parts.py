"""The valid parts of a job's YAML with their paths.

Checks between parts use these, so that a fault in one key does not hide a fault in another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from ipaddress import IPv4Address
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter, ValidationError

from checkmate.job.addresses import records_beside
from checkmate.job.faults import Path
from checkmate.job.fields import Ip

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
    found = {}
    for name, required, default in _fields(model):
        if name in raw:
            value = raw[name]
            validate = _valid if value is None or isinstance(value, _PLAIN) else _valid.__wrapped__
            try:
                found[name] = validate(model, name, value)
            except ValidationError:
                continue  # reported with the file's structure
        elif not required:
            found[name] = default
    return found


@cache
def _fields(model: type) -> list[tuple[str, bool, Any]]:
    """Return the name of each field, whether it is required, and its default."""
    found = [(one.name, _default(one)) for one in dataclasses.fields(model)]
    return [(name, default is dataclasses.MISSING, default) for name, default in found]


def _default(one: dataclasses.Field[Any]) -> Any:
    """Return the default of a field of a part of a file; `dataclasses.MISSING` if it is required."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


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
    listed = host.raw.get("addresses") if isinstance(host.raw, dict) else None
    for index, address in enumerate(listed if isinstance(listed, list) else ()):
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
