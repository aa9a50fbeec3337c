"""The difference between the entries that a switch holds and should hold, in writing order. Pure.

Entries are written in `WRITE_ORDER`, flooding with forwarding, and removed in reverse. So a connected stream
never misses a segment that training receives (design, section 6).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from controlplane.entities import WRITE_ORDER, Entity, Holdings


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
        """Return the change that undoes this one."""
        return Update(self.new, self.old)

    def __str__(self) -> str:
        return f"{self.verb} {self.entity}"


def difference(held: Holdings, wanted: Holdings) -> list[Update]:
    """Return the updates from `held` to `wanted`, in order."""
    have = {entity.key: entity for entity in held}
    want = {entity.key: entity for entity in wanted}
    puts = [Update(have.get(key), entity) for key, entity in want.items() if have.get(key) != entity]
    drops = [Update(entity, None) for key, entity in have.items() if key not in want]
    rank = {feature: place for place, feature in enumerate(WRITE_ORDER)}
    puts.sort(key=lambda update: rank[update.entity.feature])
    drops.sort(key=lambda update: -rank[update.entity.feature])
    return puts + drops


def batches(updates: Iterable[Update], size: int) -> list[list[Update]]:
    """Split updates into batches of one feature and verb each.

    P4Runtime does not define the order within a batch (specification, section 12.2).
    """
    cut: list[list[Update]] = []
    for _, run in groupby(updates, key=lambda update: (update.entity.feature, update.new is None)):
        alike = list(run)
        cut += [alike[at : at + size] for at in range(0, len(alike), size)]
    return cut
