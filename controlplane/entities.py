"""Entries of a switch as plain values: table entries, multicast groups and rates; and updates of them.

Pure: equal entries compare equal, and only `codec` knows P4Runtime's messages.
Values are integers of the widths in P4Info.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from itertools import groupby
from types import MappingProxyType
from typing import Any

FLOOD_GROUP = 1
"""The multicast group that the program floods to (`FLOOD_GROUP` in the P4 source)."""
FIRST_JOB_GROUP = 2

Value = int | tuple[int, int]
"""An exact key or a parameter; a ternary key is (value, mask)."""
Pairs = tuple[tuple[str, Value], ...]

FEATURE_OF_TABLE: Mapping[str, str] = MappingProxyType(
    {
        "sources": "sources",
        "streams": "streams",
        "incarnations": "streams",
        "lost": "streams",
        "marks": "replication",
        "boundaries": "replication",
        "replication": "replication",
        "clients": "stub",
        "stub": "stub",
        "stub_arp": "stub",
        "guarded_ports": "guard",
        "guarded_addresses": "guard",
        "forwarding": "forwarding",
    }
)
WRITE_ORDER = ("sources", "streams", "groups", "replication", "rates", "stub", "guard", "forwarding")
"""Replication comes after the streams that copies are rewritten for, and forwarding after replication.

The guard comes after the sources that it lets in, and punts after their limits.
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """A meter's limit: packets per second, and packets in a burst."""

    packets: int
    burst: int


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table entry by names; `match` and `params` in P4Info's order. `rate`: of its direct meter."""

    table: str
    match: Pairs
    action: str
    params: Pairs = ()
    priority: int = 0
    rate: Rate | None = None

    @property
    def key(self) -> EntryKey:
        """The entry's identity on a switch, independent of its action."""
        return (self.table, self.match, self.priority)

    @property
    def feature(self) -> str:
        return FEATURE_OF_TABLE[self.table]

    def __getitem__(self, name: str) -> int:
        """Return a parameter or an exact key field by name."""
        for pairs in (self.match, self.params):
            for key, value in pairs:
                if key == name and isinstance(value, int):
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
        """The feature whose turn in `WRITE_ORDER` it has.

        Flooding belongs to forwarding: before replication, it would carry segments to training alone.
        """
        return "forwarding" if self.id == FLOOD_GROUP else "groups"

    def __str__(self) -> str:
        ports = " ".join(
            f"{port}#{instance}" if instance else f"{port}" for port, instance in sorted(self.replicas)
        )
        return f"group {self.id} -> ports {ports}"


@dataclass(frozen=True, slots=True)
class PortRate:
    """The limit of a port's strangers, who send to the stub without being a client.

    `rate` is `None` if the switch has one but cannot be asked for it.
    """

    port: int
    rate: Rate | None

    @property
    def key(self) -> tuple[str, int]:
        return ("rate", self.port)

    @property
    def feature(self) -> str:
        return "rates"

    def __str__(self) -> str:
        limit = "an unknown number of" if self.rate is None else self.rate.packets
        return f"port {self.port} -> {limit} packets a second for strangers"


Entity = TableEntry | MulticastGroup | PortRate


@dataclass(slots=True)
class Holdings:
    """All entries, groups and rates that a switch holds, or should hold."""

    entries: dict[EntryKey, TableEntry] = field(default_factory=dict)
    groups: dict[int, MulticastGroup] = field(default_factory=dict)
    rates: dict[tuple[str, int], PortRate] = field(default_factory=dict)

    @classmethod
    def from_entities(cls, entities: Iterable[Entity]) -> Holdings:
        """Return holdings with these entities."""
        holdings = cls()
        for entity in entities:
            holdings.put(entity)
        return holdings

    def __iter__(self) -> Iterator[Entity]:
        yield from self.entries.values()
        yield from self.groups.values()
        yield from self.rates.values()

    def copy(self) -> Holdings:
        """Return the same entities, in dictionaries of their own."""
        return Holdings(dict(self.entries), dict(self.groups), dict(self.rates))

    def put(self, entity: Entity) -> None:
        """Add `entity`, or replace the one with the same key."""
        self._mapping_for(entity)[entity.key] = entity

    def drop(self, entity: Entity) -> None:
        """Remove the entity with the key of `entity`, if there is one."""
        self._mapping_for(entity).pop(entity.key, None)

    def _mapping_for(self, entity: Entity) -> dict[Any, Any]:
        if isinstance(entity, MulticastGroup):
            return self.groups
        return self.rates if isinstance(entity, PortRate) else self.entries

    def table(self, name: str) -> list[TableEntry]:
        """Return the entries of one table."""
        return [entry for entry in self.entries.values() if entry.table == name]

    def __len__(self) -> int:
        return len(self.entries) + len(self.groups) + len(self.rates)


def mac_number(mac: str) -> int:
    """Return a MAC address such as `02:00:00:00:00:01` as the 48-bit integer of a key."""
    return int(mac.replace(":", ""), 16)


def mac_text(number: int) -> str:
    """Return a 48-bit integer as `02:00:00:00:00:01`."""
    return ":".join(f"{byte:02x}" for byte in number.to_bytes(6, "big"))


def _show(name: str, value: Value) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:#x}&{value[1]:#x}"
    if name == "mac" or name.endswith("_mac"):
        return mac_text(value)
    if name in ("source", "destination", "address") or name.endswith("_ip"):
        return str(IPv4Address(value))
    return str(value)


@dataclass(frozen=True, slots=True)
class Update:
    """One change: insert (`old` is None), delete (`new` is None) or modify."""

    old: Entity | None
    new: Entity | None

    @property
    def entity(self) -> Entity:
        """The entity that changes."""
        entity = self.new if self.new is not None else self.old
        assert entity is not None
        return entity

    @property
    def verb(self) -> str:
        return "insert" if self.old is None else "delete" if self.new is None else "modify"

    def undone(self) -> Update:
        """Return the change that undoes this one; what has replaced an unknown rate stays."""
        return Update(self.new, self.new if _is_unknown(self.old) else self.old)

    def __str__(self) -> str:
        return f"{self.verb} {self.entity}"


def _is_unknown(entity: Entity | None) -> bool:
    return isinstance(entity, PortRate) and entity.rate is None


def difference(current: Holdings, target: Holdings) -> list[Update]:
    """Return the updates from `current` to `target`, in order. An unknown rate is replaced, never set."""
    have = {entity.key: entity for entity in current}
    want = {entity.key: entity for entity in target}
    puts = [
        Update(have.get(key), entity)
        for key, entity in want.items()
        if have.get(key) != entity and not _is_unknown(entity)
    ]
    drops = [Update(entity, None) for key, entity in have.items() if key not in want]
    rank = {feature: place for place, feature in enumerate(WRITE_ORDER)}
    puts.sort(key=lambda update: rank[update.entity.feature])
    drops.sort(key=lambda update: -rank[update.entity.feature])
    return puts + drops


def batches(updates: Iterable[Update], size: int) -> list[list[Update]]:
    """Split updates into batches of one feature and verb each.

    P4Runtime does not define the order within a batch (specification, section 12.2).
    """
    pieces: list[list[Update]] = []
    for _, run in groupby(updates, key=lambda update: (update.entity.feature, update.new is None)):
        alike = list(run)
        pieces += [alike[at : at + size] for at in range(0, len(alike), size)]
    return pieces
