"""Match kinds: the meaning of an entry's key, and the selection of the winning entry."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Generic, TypeVar

Key = int | tuple[int, int] | None
"""One match field: exact and optional `int`; LPM (value, prefix length); ternary (value, mask);
range (low, high). `None` for an omitted ternary, LPM, range or optional field, which matches all."""

T = TypeVar("T")


class MatchKind(StrEnum):
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


def _rule(kind: MatchKind, key: Key, width: int) -> Rule:
    """Return the rule of one match field."""
    full = (1 << width) - 1
    if key is None:
        return Rule(0, 0, 0, full)
    if isinstance(key, int):
        return Rule(full, key, 0, full)
    first, second = key
    if kind is MatchKind.RANGE:
        return Rule(0, 0, first, second)
    mask = second if kind is MatchKind.TERNARY else ((1 << second) - 1) << (width - second)
    return Rule(mask, first & mask, 0, full, second if kind is MatchKind.LPM else 0)


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
        rules = self._rules(match)
        rank = (-priority, -sum(rule.prefix for rule in rules), next(self.serial))
        row = _Row(rank, [(r.low, r.high) for r in rules], match, item)
        insort(self._bucket(rules), row, key=lambda r: r.rank)

    def delete(self, match: tuple[Key, ...], priority: int) -> None:
        """Remove the entry with this match and priority."""
        rules = self._rules(match)
        bucket = self._bucket(rules)
        bucket[:] = [row for row in bucket if row.match != match or row.rank[0] != -priority]
        if not bucket:
            masks = tuple(r.mask for r in rules)
            del self.groups[masks][tuple(r.bits for r in rules)]
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

    def _rules(self, match: tuple[Key, ...]) -> list[Rule]:
        return [_rule(f.kind, key, f.width) for f, key in zip(self.fields, match, strict=True)]

    def _bucket(self, rules: list[Rule]) -> list[_Row[T]]:
        buckets = self.groups.setdefault(tuple(r.mask for r in rules), {})
        return buckets.setdefault(tuple(r.bits for r in rules), [])
