"""A controller's memory of its switch: all its entries, and the connected streams."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.endpoint.endpoint import Answer, Connected
from controlplane.entities import Entity, EntryKey, Holdings, TableEntry
from controlplane.reconcile import Update


class SwitchMemory:
    """The entries of a switch: changed before the switch is, and changed back if the switch refuses."""

    def __init__(self, held: Holdings) -> None:
        self.held = held
        self.connected = Connected(held.table("streams"))

    def take(self, found: Answer, changes: dict[EntryKey, Update]) -> None:
        """Apply an answer's changes, and add them to the updates that are still to be written."""
        admission = found.admission
        drops = [*(admission.drop if admission else ()), *([found.drop] if found.drop else ())]
        for entry in drops:
            self._change(entry.key, None, changes)
        for entry in admission.put if admission else ():
            self._change(entry.key, entry, changes)

    def forget(self, updates: Iterable[Update]) -> None:
        """Undo the updates that the switch refused."""
        for update in updates:
            self._set(update.new, update.old)

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
