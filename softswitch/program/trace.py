"""The trace of a packet, as text and as data.

The traced variant of the generated code calls these methods; the plain variant does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from softswitch.program.notation import Notations
from softswitch.program.state import Entry

Event = dict[str, Any]

_DROPS = {
    "ingress": "egress_spec is the drop port at the end of ingress",
    "egress": "egress_spec is the drop port at the end of egress",
}


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
        """Add an event; the switch uses it for its own, such as a copy that a port refused."""
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

    # What generated code calls

    def packet(self, port: int, frame: bytes) -> None:
        """Note a received frame."""
        self.add("packet", port=port, bytes=len(frame))

    def state(self, name: str) -> None:
        """Note that the parser entered a state."""
        self.add("state", name=name)

    def parser_error(self, error: str) -> None:
        """Note that the parser stopped."""
        self.add("parser_error", error=error)

    def checksum_error(self, header: str, field: str) -> None:
        """Note a wrong checksum that the program verifies."""
        self.add("checksum_error", field=f"{header}.{field}")

    def condition(self, source: str, where: str, result: bool) -> None:
        """Note the result of an `if`."""
        self.add("condition", source=source, where=where, result=bool(result))

    def statements(self, where: str) -> None:
        """Note statements outside of actions."""
        self.add("statements", where=where)

    def hit(self, table: str, names: Sequence[str], key: Any, entry: Entry) -> None:
        """Note a hit in a table."""
        self.add("hit", table=table, key=_key(names, key), priority=entry.priority)

    def miss(self, table: str, names: Sequence[str], key: Any) -> None:
        """Note a miss in a table."""
        self.add("miss", table=table, key=_key(names, key))

    def default(self, action: str) -> None:
        """Note that the constant default action ran."""
        self.add("action", action=action, params={}, default=True)

    def default_entry(self, entry: Entry) -> None:
        """Note that the default action runs next; `action` follows."""

    def action(self, name: str, names: Sequence[str], entry: Entry) -> None:
        """Note that an entry's action ran."""
        params = dict(zip(names, entry.params, strict=True))
        self.add("action", action=name, params=params, default=entry.is_default)

    def log(self, text: str, values: list[int]) -> None:
        """Note a `log_msg` of the program."""
        for value in values:
            text = text.replace("{}", str(value), 1)
        self.add("log", text=text)

    def multicast(self, group: int, copies: int) -> None:
        """Note that the packet goes to a multicast group."""
        self.add("multicast", group=group, copies=copies)

    def copy(self, port: int, instance: int) -> None:
        """Note that a multicast copy enters egress."""
        self.add("copy", port=port, instance=instance)

    def drop(self, where: str) -> None:
        """Note that the program dropped the packet or a copy."""
        self.add("drop", where=where, reason=_DROPS[where])

    def output(self, port: int, frame: bytes, instance: int) -> None:
        """Note a frame that left egress."""
        self.add("output", port=port, bytes=len(frame), instance=instance)


def _key(names: Sequence[str], key: Any) -> dict[str, int]:
    values = key if isinstance(key, tuple) else (key,)
    return dict(zip(names, values, strict=True))


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
