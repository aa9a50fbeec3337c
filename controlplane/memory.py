"""A controller's memory of its switch: all its entries, the connected streams, and when they said hello."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.endpoint.endpoint import Answer, ConnectedStreams
from controlplane.entities import Entity, EntryKey, Holdings, TableEntry, Update
from controlplane.streams import StreamKey


@dataclass
class Changes:
    """Changes by answers in the memory that are not yet on the switch."""

    by_entry: dict[EntryKey, Update] = field(default_factory=dict)
    earlier_hello_times: dict[StreamKey, int | None] = field(default_factory=dict)
    """The times that were replaced."""

    @property
    def updates(self) -> list[Update]:
        """The updates that the switch lacks: additions before removals."""
        updates = [update for update in self.by_entry.values() if update.old != update.new]
        return sorted(updates, key=lambda update: update.new is None)


class SwitchMemory:
    """The entries of a switch: changed before the switch is, and changed back if the switch refuses.

    `hello_times` has the time of each stream's last hello.
    """

    def __init__(self, holdings: Holdings, hello_times: Mapping[StreamKey, int] | None = None) -> None:
        self.holdings = holdings
        self.connected = ConnectedStreams(holdings.table("streams"))
        self.hello_times = dict(hello_times or {})

    def take(self, reply: Answer, changes: Changes) -> None:
        """Apply an answer's changes, and add them to those that are still to be written."""
        admission = reply.admission
        drops = [*(admission.drops if admission else ()), *([reply.drop] if reply.drop else ())]
        for entry in drops:
            self._change(entry.key, None, changes.by_entry)
        if admission is not None:
            for entry in admission.puts:
                self._change(entry.key, entry, changes.by_entry)
            changes.earlier_hello_times.setdefault(admission.key, self.hello_times.get(admission.key))
            self.hello_times[admission.key] = admission.time

    def forget(self, changes: Changes) -> None:
        """Undo changes that the switch refused."""
        for update in changes.updates:
            self._set(update.new, update.old)
        for key, time in changes.earlier_hello_times.items():
            if time is None:
                del self.hello_times[key]
            else:
                self.hello_times[key] = time

    def _change(self, key: EntryKey, new: Entity | None, changes: dict[EntryKey, Update]) -> None:
        old = self.holdings.entries.get(key)
        first = changes[key].old if key in changes else old
        changes[key] = Update(first, new)
        self._set(old, new)

    def _set(self, old: Entity | None, new: Entity | None) -> None:
        if new is not None:
            self.holdings.put(new)
        elif old is not None:
            self.holdings.drop(old)
        for entity, change in ((old, self.connected.drop), (new, self.connected.put)):
            if isinstance(entity, TableEntry) and entity.table == "streams":
                change(entity)
