"""The trace of a packet, as text and as data.

The traced variant of the generated code adds events; the plain variant does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from softswitch.program.notation import Notations

Event = dict[str, Any]


class Trace:
    """The events of one packet, in order. `notations` are those of its program."""

    def __init__(self, notations: Notations | None = None) -> None:
        self._events: list[Event] = []
        self._notations = notations

    def data(self) -> list[Event]:
        """Return the events; each has its kind in `event`, and the fields of that kind."""
        return self._events

    def text(self) -> str:
        """Return the events as one paragraph of short lines."""
        return "\n".join(
            ("  " if place else "") + self._line(event) for place, event in enumerate(self._events)
        )

    def add(self, event: str, **what: Any) -> None:
        """Add an event of a packet; `what` are its fields."""
        self._events.append({"event": event, **what})

    def _line(self, event: Event) -> str:
        kind = event["event"]
        if kind in ("hit", "miss"):
            write_key = self._notations.key if self._notations else _hex
            return f"table {event['table']}({_pairs(event['table'], event['key'], write_key)}): {kind}"
        if kind == "action":
            default = " (default)" if event["default"] else ""
            write_param = self._notations.param if self._notations else _hex
            return (
                f"action {event['action']}({_pairs(event['action'], event['params'], write_param)}){default}"
            )
        if kind == "multicast":
            copies = event["copies"]
            return f"multicast: group {event['group']}, {copies} {'copy' if copies == 1 else 'copies'}"
        if kind in _TEXTS:
            return _TEXTS[kind].format(**event)
        return f"{kind}: " + ", ".join(f"{name} {value}" for name, value in event.items() if name != "event")


def _pairs(owner: str, values: dict[str, int], write: Callable[[str, str, int], str]) -> str:
    return ", ".join(f"{name}={write(owner, name, value)}" for name, value in values.items())


def _hex(owner: str, name: str, value: int) -> str:
    return hex(value)


_TEXTS = {
    "packet": "packet: port {port}, {bytes} bytes",
    "state": "parser: {name}",
    "parser_error": "parser: stopped with {error}",
    "checksum_error": "checksum: {field} is wrong",
    "condition": "if {source} ({where}): {result}",
    "statements": "statements: {where}",
    "log": "log: {text}",
    "copy": "copy: port {port}, instance {instance}",
    "drop": "drop in {where}: {reason}",
    "output": "output: port {port}, {bytes} bytes",
}
