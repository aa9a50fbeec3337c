"""What a switch holds, as plain values: table entries and multicast groups.

Pure: equal things compare equal, and nothing here knows P4Runtime's messages (`codec` does).
Values are integers as P4Info's widths want them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

FLOOD_GROUP = 1
"""The multicast group that the program floods to (`FLOOD_GROUP` in the P4 source)."""
FIRST_JOB_GROUP = 2

Value = int | tuple[int, int]
"""An exact key or a parameter; a ternary key is (value, mask)."""
Pairs = tuple[tuple[str, Value], ...]

FEATURE_OF_TABLE: Mapping[str, str] = MappingProxyType(
    {
        "streams": "streams",
        "incarnations": "streams",
        "lost": "streams",
        "marks": "replication",
        "replication": "replication",
        "stub": "stub",
        "stub_arp": "stub",
        "forwarding": "forwarding",
    }
)
WRITE_ORDER = ("streams", "groups", "replication", "stub", "forwarding")
"""Nothing is replicated before there is a stream to rewrite it for, nor forwarded before it is replicated."""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table entry by names; `match` and `params` in P4Info's order."""

    table: str
    match: Pairs
    action: str
    params: Pairs = ()
    priority: int = 0

    @property
    def key(self) -> EntryKey:
        """What makes it the same entry to a switch, whatever its action."""
        return (self.table, self.match, self.priority)

    @property
    def feature(self) -> str:
        return FEATURE_OF_TABLE[self.table]

    def __getitem__(self, name: str) -> int:
        """A key field or parameter by name, exact ones only."""
        for pairs in (self.match, self.params):
            for found, value in pairs:
                if found == name and isinstance(value, int):
                    return value
        raise KeyError(name)

    def __str__(self) -> str:
        match = " ".join(f"{k}={_show(k, v)}" for k, v in self.match)
        params = ", ".join(f"{k}={_show(k, v)}" for k, v in self.params)
        return f"{self.table}[{match}] -> {self.action}({params})"


EntryKey = tuple[str, Pairs, int]


@dataclass(frozen=True, slots=True)
class MulticastGroup:
    """A multicast group; each replica is (port, instance), instance 0 being the training copy."""

    id: int
    replicas: frozenset[tuple[int, int]]

    @property
    def key(self) -> int:
        return self.id

    @property
    def feature(self) -> str:
        """Flooding is forwarding: before replication it would carry segments to training alone."""
        return "forwarding" if self.id == FLOOD_GROUP else "groups"

    def __str__(self) -> str:
        ports = " ".join(
            f"{port}#{instance}" if instance else f"{port}" for port, instance in sorted(self.replicas)
        )
        return f"group {self.id} -> ports {ports}"


Entity = TableEntry | MulticastGroup


@dataclass(slots=True)
class Holdings:
    """All that a switch holds, or should hold."""

    entries: dict[EntryKey, TableEntry] = field(default_factory=dict)
    groups: dict[int, MulticastGroup] = field(default_factory=dict)

    @classmethod
    def of(cls, entities: Iterable[Entity]) -> Holdings:
        held = cls()
        for entity in entities:
            held.put(entity)
        return held

    def copy(self) -> Holdings:
        """Return the same entities, in dictionaries of their own."""
        return Holdings(dict(self.entries), dict(self.groups))

    def put(self, entity: Entity) -> None:
        """Add, or replace what has the same key."""
        if isinstance(entity, MulticastGroup):
            self.groups[entity.id] = entity
        else:
            self.entries[entity.key] = entity

    def drop(self, entity: Entity) -> None:
        """Remove what has the key of `entity`, if there is one."""
        if isinstance(entity, MulticastGroup):
            self.groups.pop(entity.id, None)
        else:
            self.entries.pop(entity.key, None)

    def table(self, name: str) -> list[TableEntry]:
        """The entries of one table."""
        return [entry for entry in self.entries.values() if entry.table == name]

    def __len__(self) -> int:
        return len(self.entries) + len(self.groups)


def mac_number(mac: str) -> int:
    """`02:00:00:00:00:01` as the 48-bit integer of a key."""
    return int(mac.replace(":", ""), 16)


def mac_text(number: int) -> str:
    """A 48-bit integer as `02:00:00:00:00:01`."""
    return ":".join(f"{byte:02x}" for byte in number.to_bytes(6, "big"))


def ip_text(number: int) -> str:
    """A 32-bit integer as a dotted quad."""
    return ".".join(str(byte) for byte in number.to_bytes(4, "big"))


def _show(name: str, value: Value) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:#x}&{value[1]:#x}"
    if name == "mac" or name.endswith("_mac"):
        return mac_text(value)
    if name in ("source", "destination", "address") or name.endswith("_ip"):
        return ip_text(value)
    return str(value)
