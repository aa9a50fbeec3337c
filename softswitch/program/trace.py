"""The trace of a packet, as text and as data.

The traced variant of the generated code adds events; the plain variant does not.
"""

from __future__ import annotations

from typing import Any

from softswitch.program.notation import Notations

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
