"""The winning entry: the index against a search through all entries."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softswitch.program.match import Key, MatchField, MatchIndex, MatchKind
from softswitch.program.state import Entry, StatusError, Table

WIDTH = 4
TOP = (1 << WIDTH) - 1
VALUES = st.integers(0, TOP)
KEYS: dict[MatchKind, st.SearchStrategy[Key]] = {
    MatchKind.EXACT: VALUES,
    MatchKind.LPM: st.none() | st.tuples(VALUES, st.integers(1, WIDTH)),
    MatchKind.TERNARY: st.none() | st.tuples(VALUES, VALUES),
    MatchKind.RANGE: st.none() | st.tuples(VALUES, VALUES).map(lambda ends: (min(ends), max(ends))),
    MatchKind.OPTIONAL: st.none() | VALUES,
}


def hit(kind: MatchKind, key: Key, value: int) -> bool:
    """Return whether a value matches, by the P4Runtime specification's rule for each match kind."""
    if key is None:
        return True
    if isinstance(key, int):
        return value == key
    first, second = key
    if kind is MatchKind.RANGE:
        return first <= value <= second
    if kind is MatchKind.LPM:
        return f"{value:0{WIDTH}b}"[:second] == f"{first:0{WIDTH}b}"[:second]
    return all(value >> bit & 1 == first >> bit & 1 for bit in range(WIDTH) if second >> bit & 1)


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[MatchField, ...], list[tuple[tuple[Key, ...], int]]]:
    """Return fields, and entries (match, priority) without duplicates."""
    kinds = draw(st.lists(st.sampled_from(MatchKind), min_size=1, max_size=3))
    fields = tuple(MatchField(n, f"f{n}", WIDTH, kind) for n, kind in enumerate(kinds, 1))
    ordered = any(kind not in (MatchKind.EXACT, MatchKind.LPM) for kind in kinds)
    priorities = st.integers(1, 3) if ordered else st.just(0)
    entry = st.tuples(st.tuples(*(KEYS[kind] for kind in kinds)), priorities)
    return fields, draw(st.lists(entry, max_size=12, unique=True))


def expected(
    fields: tuple[MatchField, ...], entries: list[tuple[tuple[Key, ...], int]], packet: tuple[int, ...]
) -> tuple[tuple[Key, ...], int] | None:
    """Return the winner: highest priority, then longest prefixes, then first inserted."""

    def prefix(match: tuple[Key, ...]) -> int:
        lengths = zip(fields, match, strict=True)
        return sum(k[1] for f, k in lengths if f.kind is MatchKind.LPM and isinstance(k, tuple))

    def hits(match: tuple[Key, ...]) -> bool:
        return all(hit(f.kind, k, v) for f, k, v in zip(fields, match, packet, strict=True))

    matching = [entry for entry in entries if hits(entry[0])]
    return max(matching, key=lambda entry: (entry[1], prefix(entry[0])), default=None)


@given(tables(), st.data())
def test_the_index_finds_what_a_search_finds(
    table: tuple[tuple[MatchField, ...], list[tuple[tuple[Key, ...], int]]], data: st.DataObject
) -> None:
    fields, entries = table
    index: MatchIndex[tuple[tuple[Key, ...], int]] = MatchIndex(fields)
    for entry in entries:
        index.insert(*entry, entry)
    deleted = data.draw(st.sets(st.sampled_from(entries))) if entries else set()
    for entry in deleted:
        index.delete(*entry)
    remaining = [entry for entry in entries if entry not in deleted]
    for packet in data.draw(st.lists(st.tuples(*(VALUES for _ in fields)), min_size=1, max_size=20)):
        assert index.find(packet) == expected(fields, remaining, packet)
    for entry in remaining:
        index.delete(*entry)
    assert index.groups == {}


@given(tables(), st.data())
def test_a_table_remembers_nothing_stale(
    table: tuple[tuple[MatchField, ...], list[tuple[tuple[Key, ...], int]]], data: st.DataObject
) -> None:
    fields, entries = table
    packets = data.draw(st.lists(st.tuples(*(VALUES for _ in fields)), min_size=1, max_size=5))
    switch = Table(1, "t", fields, 100, None, False)
    present: list[tuple[tuple[Key, ...], int]] = []
    for match, priority in entries:
        switch.insert(Entry(match, 1, (), priority))
        present.append((match, priority))
        if len(present) > 3:
            switch.delete(*present.pop(0))
        for packet in packets:
            entry = switch.lookup(packet if len(packet) > 1 else packet[0])
            assert (entry and (entry.match, entry.priority)) == expected(fields, present, packet)


FIELDS = (MatchField(1, "a", 32, MatchKind.EXACT), MatchField(2, "b", 16, MatchKind.EXACT))


def test_modify_keeps_the_counter_and_shows_at_once() -> None:
    for kind, match, packet in ((MatchKind.EXACT, (5,), 5), (MatchKind.LPM, ((8, 1),), 9)):
        switch = Table(1, "t", (MatchField(1, "a", 4, kind),), 2, None, False)
        switch.insert(Entry(match, 1, (7,)))
        first = switch.lookup(packet)
        assert first is not None
        first.count.packets = 3
        switch.modify(Entry(match, 2, (8,)))
        second = switch.lookup(packet)
        assert second is not None
        assert (second.action, second.params, second.count.packets) == (2, (8,), 3)


def test_refused_updates_name_the_code() -> None:
    switch = Table(1, "t", FIELDS, 1, None, False)
    switch.insert(Entry((1, 2), 1, ()))
    with pytest.raises(StatusError, match="already has") as again:
        switch.insert(Entry((1, 2), 1, ()))
    with pytest.raises(StatusError, match="is full: it has 1") as full:
        switch.insert(Entry((1, 3), 1, ()))
    with pytest.raises(StatusError, match="no such entry") as unknown:
        switch.delete((9, 9), 0)
    switch.const_entries = True
    with pytest.raises(StatusError, match="constant entries") as constant:
        switch.delete((1, 2), 0)
    codes = [error.value.code for error in (again, full, unknown, constant)]
    assert codes == ["ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "NOT_FOUND", "PERMISSION_DENIED"]


def test_a_full_table_of_exact_keys_is_quick() -> None:
    switch = Table(1, "t", FIELDS, 32768, None, False)
    start = time.thread_time()
    for number in range(32768):
        switch.insert(Entry((number * 7, number & 0xFFFF), 1, ()))
    assert time.thread_time() - start < 2
    assert len(switch.index) == 32768
    assert switch.lookup((70, 10)) is switch.entries[(70, 10), 0]
