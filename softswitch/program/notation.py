"""Notation of a program's values in traces: addresses in their usual notation, all else in hexadecimal.

A program specifies a field's width and name, but not its meaning. So a packet header's field of 48 bits is
assumed to be a MAC address, and one of 32 (128) bits an IPv4 (IPv6) address if its header has that name, or
if its own name contains `ip` or `addr`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address

from softswitch.program.bmv2 import Json, ProgramConfig

Notation = Callable[[int], str]

_MAC_BITS, _IPV4_BITS, _IPV6_BITS = 48, 32, 128
_MAC_NAME = re.compile(r"addr|(^|[_.])mac($|[_.\d])", re.IGNORECASE)
_IP_NAME = re.compile(r"addr|(^|[_.])ip(v?[46])?($|[_.])", re.IGNORECASE)


def mac(value: int) -> str:
    """Return a value like `02:00:00:00:00:01`."""
    return value.to_bytes(6, "big").hex(":")


def ipv4(value: int) -> str:
    """Return a value like `10.0.0.1`."""
    return str(IPv4Address(value))


def ipv6(value: int) -> str:
    """Return a value like `fe80::1`."""
    return str(IPv6Address(value))


def notation(width: int, name: str, header: str = "", header_type: str = "") -> Notation:
    """Return the notation of a value of `width` bits; `header` is empty outside of packet headers."""
    if width == _MAC_BITS and (header or _MAC_NAME.search(name)):
        return mac
    kinds = (header.rpartition(".")[2], header_type)
    if width == _IPV4_BITS and (_IP_NAME.search(name) or any(kind.startswith("ipv4") for kind in kinds)):
        return ipv4
    if width == _IPV6_BITS and (_IP_NAME.search(name) or any(kind.startswith("ipv6") for kind in kinds)):
        return ipv6
    return hex


class Notations:
    """The notation of every table key and action parameter of a program."""

    def __init__(self, config: ProgramConfig) -> None:
        self._keys: dict[tuple[str, str], Notation] = {}
        self._params: dict[tuple[str, str], Notation] = {}
        for pipeline in config.pipelines.values():
            for table in pipeline["tables"]:
                for key in table["key"]:
                    self._keys[table["name"], key["name"]] = _of_field(config, key["target"], key["name"])
        for action in config.actions.values():
            for number, param in enumerate(action["runtime_data"]):
                found = _of_param(config, action, number, param)
                self._params[action["name"], param["name"]] = found

    def key(self, owner: str, name: str, value: int) -> str:
        """Return the value of a table's key, as text."""
        return self._keys.get((owner, name), hex)(value)

    def param(self, owner: str, name: str, value: int) -> str:
        """Return the value of an action's parameter, as text."""
        return self._params.get((owner, name), hex)(value)


def _of_field(config: ProgramConfig, reference: list[str], name: str = "") -> Notation:
    """Return the notation of a field, which may have another `name` in a table."""
    header = config.headers[reference[0]]
    if reference[1] == "$valid$":
        return hex
    width = config.field(reference).width
    if header.metadata:
        return notation(width, name or reference[1])
    by_name = notation(width, name)
    return by_name if by_name is not hex else notation(width, reference[1], header.name, header.type)


def _of_param(config: ProgramConfig, action: Json, number: int, param: Json) -> Notation:
    """Return a parameter's notation: that of the packet's field it is assigned to, else by its own name."""
    for reference in _targets(action, number):
        if config.headers[reference[0]].metadata or config.field(reference).width != param["bitwidth"]:
            continue
        return _of_field(config, reference)
    return notation(param["bitwidth"], param["name"])


def _targets(action: Json, number: int) -> Iterator[list[str]]:
    """Yield the fields that an action assigns its parameter `number` to."""
    for primitive in action["primitives"]:
        if primitive["op"] == "assign":
            target, source = primitive["parameters"]
            if target["type"] == "field" and source == {"type": "runtime_data", "value": number}:
                yield target["value"]
