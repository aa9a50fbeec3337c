"""The trace of a packet, as text and as data, and the notation of addresses in it.

The traced variant of the generated code adds events; the plain variant does not.

A program specifies a field's width and name, but not its meaning. So a packet header's field of 48 bits is
assumed to be a MAC address, and one of 32 (128) bits an IPv4 (IPv6) address if its header has that name, or
if its own name contains `ip` or `addr`. All other values are hexadecimal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from softswitch.program.bmv2 import Json, ProgramConfig

Notation = Callable[[int], str]
Notations = dict[tuple[str, str, str], Notation]
"""Notations by ("table", its name, key) and ("action", its name, parameter); all others are hexadecimal."""

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


def program_notations(config: ProgramConfig) -> Notations:
    """Return the notation of every table key and action parameter of a program."""
    notations: Notations = {}
    for pipeline in config.pipelines.values():
        for table in pipeline["tables"]:
            for key in table["key"]:
                notations["table", table["name"], key["name"]] = _field_notation(
                    config, key["target"], key["name"]
                )
    for action in config.actions.values():
        for number, param in enumerate(action["runtime_data"]):
            notations["action", action["name"], param["name"]] = _param_notation(
                config, action, number, param
            )
    return notations


def _field_notation(config: ProgramConfig, reference: list[str], name: str = "") -> Notation:
    """Return the notation of a field, which may have another `name` in a table."""
    header = config.headers[reference[0]]
    if reference[1] == "$valid$":
        return hex
    width = config.field(reference).width
    if header.metadata:
        return notation(width, name or reference[1])
    by_name = notation(width, name)
    return by_name if by_name is not hex else notation(width, reference[1], header.name, header.type)


def _param_notation(config: ProgramConfig, action: Json, number: int, param: Json) -> Notation:
    """Return a parameter's notation: that of the packet's field it is assigned to, else by its own name."""
    for primitive in action["primitives"]:
        if primitive["op"] != "assign":
            continue
        target, source = primitive["parameters"]
        if target["type"] != "field" or source != {"type": "runtime_data", "value": number}:
            continue
        header, _ = target["value"]
        if not config.headers[header].metadata and config.field(target["value"]).width == param["bitwidth"]:
            return _field_notation(config, target["value"])
    return notation(param["bitwidth"], param["name"])


Event = dict[str, Any]


class Trace:
    """The events of one packet, in order. `notations` are those of its program."""

    def __init__(self, notations: Notations | None = None) -> None:
        self._events: list[Event] = []
        self._notations = notations or {}

    def data(self) -> list[Event]:
        """Return the events; each has its kind in `event`, and the fields of that kind."""
        return self._events

    def text(self) -> str:
        """Return the events as one paragraph of short lines."""
        return "\n".join(
            ("  " if place else "") + self._line(event) for place, event in enumerate(self._events)
        )

    def add(self, event: str, **fields: Any) -> None:
        """Add an event of a packet; `fields` are its fields."""
        self._events.append({"event": event, **fields})

    def _line(self, event: Event) -> str:
        kind = event["event"]
        if kind in ("hit", "miss"):
            return f"table {event['table']}({self._pairs('table', event['table'], event['key'])}): {kind}"
        if kind == "action":
            default = " (default)" if event["default"] else ""
            params = self._pairs("action", event["action"], event["params"])
            return f"action {event['action']}({params}){default}"
        if kind == "multicast":
            copies = event["copies"]
            return f"multicast: group {event['group']}, {copies} {'copy' if copies == 1 else 'copies'}"
        if kind in _TEXTS:
            return _TEXTS[kind].format(**event)
        return f"{kind}: " + ", ".join(f"{name} {value}" for name, value in event.items() if name != "event")

    def _pairs(self, kind: str, owner: str, values: dict[str, int]) -> str:
        """Return keys of a table, or parameters of an action, as text."""
        texts = {name: self._notations.get((kind, owner, name), hex)(value) for name, value in values.items()}
        return ", ".join(f"{name}={text}" for name, text in texts.items())


_TEXTS = {
    "packet": "packet: port {port}, {bytes} bytes",
    "state": "parser: {name}",
    "parser_error": "parser: stopped with {error}",
    "checksum_error": "checksum: {field} is wrong",
    "condition": "if {source} ({where}): {result}",
    "statements": "statements: {where}",
    "meter": "meter {name}: color {color}",
    "log": "log: {text}",
    "copy": "copy: port {port}, instance {instance}",
    "drop": "drop in {where}: {reason}",
    "output": "output: port {port}, {bytes} bytes",
}
