"""A controller's memory of its switch: all its entries, the connected streams, and when they said hello."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.endpoint.endpoint import Answer, Connected
from controlplane.entities import Entity, EntryKey, Holdings, TableEntry, Update
from controlplane.streams import StreamKey


@dataclass
class Changes:
    """What answers have changed in the memory, and not yet on the switch."""

    by_entry: dict[EntryKey, Update] = field(default_factory=dict)
    accepted_before: dict[StreamKey, int | None] = field(default_factory=dict)
    """The times that were replaced."""

    @property
    def updates(self) -> list[Update]:
        """What the switch lacks: first what is to be put."""
        changed = [update for update in self.by_entry.values() if update.old != update.new]
        return sorted(changed, key=lambda update: update.new is None)


class SwitchMemory:
    """The entries of a switch: changed before the switch is, and changed back if the switch refuses.

    `accepted` has the time of each stream's last hello.
    """

    def __init__(self, held: Holdings, accepted: Mapping[StreamKey, int] | None = None) -> None:
        self.held = held
        self.connected = Connected(held.table("streams"))
        self.accepted = dict(accepted or {})

    def take(self, found: Answer, changes: Changes) -> None:
        """Apply an answer's changes, and add them to those that are still to be written."""
        admission = found.admission
        drops = [*(admission.drop if admission else ()), *([found.drop] if found.drop else ())]
        for entry in drops:
            self._change(entry.key, None, changes.by_entry)
        if admission is not None:
            for entry in admission.put:
                self._change(entry.key, entry, changes.by_entry)
            changes.accepted_before.setdefault(admission.key, self.accepted.get(admission.key))
            self.accepted[admission.key] = admission.time

    def forget(self, changes: Changes) -> None:
        """Undo changes that the switch refused."""
        for update in changes.updates:
            self._set(update.new, update.old)
        for key, time in changes.accepted_before.items():
            if time is None:
                del self.accepted[key]
            else:
                self.accepted[key] = time

    def _change(self, key: EntryKey, new: Entity | None, changes: dict[EntryKey, Update]) -> None:
        old = self.held.entries.get(key)
        first = changes[key].old if key in changes else old
        changes[key] = Update(first, new)
        self._set(old, new)

    def _set(self, old: Entity | None, new: Entity | None) -> None:
        if new is not None:
            self.held.put(new)
        elif old is not None:
            self.held.drop(old)
        for entity, change in ((old, self.connected.drop), (new, self.connected.put)):
            if isinstance(entity, TableEntry) and entity.table == "streams":
                change(entity)
