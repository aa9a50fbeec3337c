"""The state of a running program: table entries, counters, meters, registers, multicast groups.

All of it is plain data by P4Info id. The P4Runtime service writes it, and generated code reads it for every
packet; a lock in the switch excludes the two. Generated code keeps references to tables and to the lists of
counters, meters and registers: change their contents, but never replace them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from softswitch.program.match import Key, MatchField, MatchIndex, MatchKind
from softswitch.program.meters import MeterCell

LookupKey = int | tuple[int, ...]
"""A packet's key: the value of a single field, or the values of all."""

MAX_CACHED = 65536


class StatusError(Exception):
    """A refused request; `code` is the name of the canonical gRPC code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class CounterCell:
    """One counter cell, to which generated code adds."""

    packets: int = 0
    bytes: int = 0

    def set(self, packets: int, bytes_: int) -> None:
        """Set both counts."""
        self.packets, self.bytes = packets, bytes_


@dataclass(slots=True)
class Entry:
    """A table entry. `match` has one `Key` per match field in P4Info order."""

    match: tuple[Key, ...]
    action: int
    params: tuple[int, ...]
    priority: int = 0
    metadata: bytes = b""
    controller_metadata: int = 0
    is_default: bool = False
    count: CounterCell = field(default_factory=CounterCell)
    meter: MeterCell | None = None


@dataclass(slots=True)
class Table:
    """A match-action table: its shape, and its entries keyed by (match, priority)."""

    id: int
    name: str
    fields: tuple[MatchField, ...]
    size: int
    initial_default: Entry | None
    const_default: bool
    entries: dict[tuple[tuple[Key, ...], int], Entry] = field(default_factory=dict)
    default: Entry | None = None
    const_entries: bool = False
    """The table has only the program's own entries."""
    entry_actions: set[int] = field(default_factory=set)
    """Actions that entries may have."""
    default_actions: set[int] = field(default_factory=set)
    index: dict[LookupKey, Entry | None] = field(default_factory=dict)
    """In exact tables, every entry by its key; in others, the results of `lookup` since the last change."""
    masked: MatchIndex[Entry] = field(init=False)

    def __post_init__(self) -> None:
        self.masked = MatchIndex(self.fields)

    @property
    def exact(self) -> bool:
        """True if every field is exact, so that `index` is enough for lookups."""
        return all(f.kind is MatchKind.EXACT for f in self.fields)

    def insert(self, entry: Entry) -> None:
        """Add an entry; raise `StatusError` ALREADY_EXISTS, RESOURCE_EXHAUSTED or PERMISSION_DENIED."""
        self._check_writable()
        key = (entry.match, entry.priority)
        if key in self.entries:
            raise StatusError("ALREADY_EXISTS", f"table {self.name} already has this entry")
        if len(self.entries) >= self.size:
            raise StatusError("RESOURCE_EXHAUSTED", f"table {self.name} is full: it has {self.size} entries")
        self.install(entry)

    def install(self, entry: Entry) -> None:
        """Add an entry without checks, such as one of the program's own."""
        self.entries[entry.match, entry.priority] = entry
        if self.exact:
            self.index[self._lookup_key(entry.match)] = entry
        else:
            self.masked.insert(entry.match, entry.priority, entry)
            self.index.clear()

    def modify(self, entry: Entry) -> None:
        """Change the entry with this match and priority, but not its count; raise `StatusError` NOT_FOUND."""
        self._check_writable()
        current = self.entries.get((entry.match, entry.priority))
        if current is None:
            raise StatusError("NOT_FOUND", f"table {self.name} has no such entry")
        current.action, current.params = entry.action, entry.params
        current.metadata, current.controller_metadata = entry.metadata, entry.controller_metadata
        current.meter = entry.meter

    def delete(self, match: tuple[Key, ...], priority: int) -> Entry:
        """Remove an entry and return it; raise `StatusError` NOT_FOUND."""
        self._check_writable()
        entry = self.entries.pop((match, priority), None)
        if entry is None:
            raise StatusError("NOT_FOUND", f"table {self.name} has no such entry")
        if self.exact:
            del self.index[self._lookup_key(match)]
        else:
            self.masked.delete(match, priority)
            self.index.clear()
        return entry

    def set_default(self, entry: Entry | None) -> None:
        """Set the default action; `None` restores the program's own."""
        self.default = self.initial_default if entry is None else entry

    def lookup(self, key: LookupKey) -> Entry | None:
        """Return the winning entry for a packet's key, cached until the next change; `None` for a miss."""
        if self.exact:
            return self.index.get(key)
        if len(self.index) >= MAX_CACHED:
            self.index.clear()
        winner = self.masked.find(key if isinstance(key, tuple) else (key,))
        self.index[key] = winner
        return winner

    def _lookup_key(self, match: tuple[Key, ...]) -> LookupKey:
        values = tuple(key for key in match if isinstance(key, int))
        return values[0] if len(values) == 1 else values

    def _check_writable(self) -> None:
        if self.const_entries:
            raise StatusError("PERMISSION_DENIED", f"table {self.name} has only constant entries")


class GroupReplica(NamedTuple):
    """A copy of a multicast group: port and instance (the replication id)."""

    port: int
    instance: int


@dataclass(slots=True)
class State:
    """All state of one loaded program that P4Runtime can read and write."""

    tables: dict[int, Table] = field(default_factory=dict)
    counters: dict[int, list[CounterCell]] = field(default_factory=dict)
    meters: dict[int, list[MeterCell | None]] = field(default_factory=dict)
    registers: dict[int, list[int]] = field(default_factory=dict)
    groups: dict[int, tuple[GroupReplica, ...]] = field(default_factory=dict)

    def all_entries(self) -> Iterator[tuple[Table, Entry]]:
        """Yield every table entry, table by table."""
        for table in self.tables.values():
            for entry in table.entries.values():
                yield table, entry
