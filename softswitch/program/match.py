"""Match kinds: the meaning of an entry's key, and the selection of the winning entry.

A further match kind is one more line in `MatchKind` and one in `KINDS`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Generic, TypeVar

Key = int | tuple[int, int] | None
"""One match field: exact and optional `int`; LPM (value, prefix length); ternary (value, mask);
range (low, high). `None` for an omitted ternary, LPM, range or optional field, which matches all."""

T = TypeVar("T")


class MatchKind(Enum):
    """Match kinds of the P4Runtime specification, section 9.1."""

    EXACT = "exact"
    LPM = "lpm"
    TERNARY = "ternary"
    RANGE = "range"
    OPTIONAL = "optional"


@dataclass(frozen=True, slots=True)
class MatchField:
    """A key field: P4Info id, name, width in bits, match kind."""

    id: int
    name: str
    width: int
    kind: MatchKind


@dataclass(frozen=True, slots=True)
class Rule:
    """One field of one entry: a value matches if `value & mask == bits` and `low <= value <= high`."""

    mask: int
    bits: int
    low: int
    high: int
    prefix: int = 0
    """Length of an LPM prefix; among equal priorities, the longest wins."""


def _masked(value: int, mask: int, width: int, prefix: int = 0) -> Rule:
    return Rule(mask, value & mask, 0, (1 << width) - 1, prefix)


def _exact(key: Key, width: int) -> Rule:
    if not isinstance(key, int):
        return _masked(0, 0, width)
    return _masked(key, (1 << width) - 1, width)


def _lpm(key: Key, width: int) -> Rule:
    value, length = key if isinstance(key, tuple) else (0, 0)
    return _masked(value, ((1 << length) - 1) << (width - length), width, length)


def _ternary(key: Key, width: int) -> Rule:
    value, mask = key if isinstance(key, tuple) else (0, 0)
    return _masked(value, mask, width)


def _range(key: Key, width: int) -> Rule:
    low, high = key if isinstance(key, tuple) else (0, (1 << width) - 1)
    return Rule(0, 0, low, high)


KINDS: dict[MatchKind, Callable[[Key, int], Rule]] = {
    MatchKind.EXACT: _exact,
    MatchKind.LPM: _lpm,
    MatchKind.TERNARY: _ternary,
    MatchKind.RANGE: _range,
    MatchKind.OPTIONAL: _exact,
}


def rules(fields: tuple[MatchField, ...], match: tuple[Key, ...]) -> list[Rule]:
    """Return an entry's rule for each field, in the fields' order."""
    return [KINDS[f.kind](key, f.width) for f, key in zip(fields, match, strict=True)]


@dataclass(slots=True)
class _Row(Generic[T]):
    """An entry in the index. The lowest `rank` wins; ranks are unique."""

    rank: tuple[int, int, int]
    ranges: list[tuple[int, int]]
    match: tuple[Key, ...]
    item: T


@dataclass(slots=True)
class MatchIndex(Generic[T]):
    """Index that finds the winning entry among keys with masks, prefixes and ranges.

    Entries with the same masks share a dict from masked key to entries, so a lookup costs one dict access for
    each set of masks in use. The higher priority wins (P4Runtime specification, section 9.1), then the longer
    prefix, then the entry that was inserted first.
    """

    fields: tuple[MatchField, ...]
    groups: dict[tuple[int, ...], dict[tuple[int, ...], list[_Row[T]]]] = field(default_factory=dict)
    serial: count[int] = field(default_factory=count)

    def insert(self, match: tuple[Key, ...], priority: int, item: T) -> None:
        """Add a new entry."""
        asked = rules(self.fields, match)
        rank = (-priority, -sum(r.prefix for r in asked), next(self.serial))
        row = _Row(rank, [(r.low, r.high) for r in asked], match, item)
        insort(self._bucket(asked), row, key=lambda r: r.rank)

    def replace(self, match: tuple[Key, ...], priority: int, item: T) -> None:
        """Replace the item of the entry with this match and priority."""
        for row in self._bucket(rules(self.fields, match)):
            if row.match == match and row.rank[0] == -priority:
                row.item = item

    def delete(self, match: tuple[Key, ...], priority: int) -> None:
        """Remove the entry with this match and priority."""
        asked = rules(self.fields, match)
        bucket = self._bucket(asked)
        bucket[:] = [row for row in bucket if row.match != match or row.rank[0] != -priority]
        if not bucket:
            masks = tuple(r.mask for r in asked)
            del self.groups[masks][tuple(r.bits for r in asked)]
            if not self.groups[masks]:
                del self.groups[masks]

    def find(self, key: tuple[int, ...]) -> T | None:
        """Return the entry that wins for a packet's key, or `None`."""
        best: _Row[T] | None = None
        for masks, buckets in self.groups.items():
            for row in buckets.get(tuple(k & m for k, m in zip(key, masks, strict=True)), ()):
                if best is not None and best.rank < row.rank:
                    break
                if all(low <= k <= high for k, (low, high) in zip(key, row.ranges, strict=True)):
                    best = row
                    break
        return None if best is None else best.item

    def _bucket(self, asked: list[Rule]) -> list[_Row[T]]:
        buckets = self.groups.setdefault(tuple(r.mask for r in asked), {})
        return buckets.setdefault(tuple(r.bits for r in asked), [])
