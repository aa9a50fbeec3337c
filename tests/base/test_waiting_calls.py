"""Limits of calls that wait for their clients: too many of them, or too long a wait."""

from __future__ import annotations

import pytest

from checkmate.base.waiting_calls import (
    CROWDED_SECONDS,
    FIRST_SECONDS,
    MAX_HOST,
    REMEMBERED_SECONDS,
    WaitingCalls,
    host_of_call,
)

LATER_SECONDS = 60.0


def test_calls_that_wait_for_long_end() -> None:
    calls = WaitingCalls(LATER_SECONDS)
    assert calls.begin("first", "a", 0.0, first=True)
    assert calls.begin("second", "a", 1.0, first=True)
    assert calls.begin("later", "a", 0.0, first=False)
    assert calls.late(FIRST_SECONDS) == []
    assert calls.late(FIRST_SECONDS + 0.5) == ["first"]
    assert calls.late(FIRST_SECONDS + 0.5) == []
    assert not calls.end("first")
    assert calls.end("second")
    assert calls.late(LATER_SECONDS) == []
    assert calls.late(LATER_SECONDS + 0.5) == ["later"]


def test_a_crowd_ends_soon_and_its_host_is_admitted_few_calls_for_a_while() -> None:
    calls = WaitingCalls(LATER_SECONDS)
    for number in range(MAX_HOST):
        assert calls.begin(number, "a", 0.0, first=True)
    assert calls.late(1.0) == [], "not a crowd yet"
    assert calls.begin("one more", "a", 1.0, first=True)
    assert calls.begin("other", "b", 1.0, first=True)
    assert calls.late(1.0 + CROWDED_SECONDS / 2) == list(range(MAX_HOST))
    admitted = [calls.begin(f"new {number}", "a", 2.0, first=True) for number in range(MAX_HOST)]
    assert admitted == [True] * (MAX_HOST - 1) + [False], "'one more' waits, too"
    assert calls.begin("at work", "a", 2.0, first=False), "a call that has begun is not part of a crowd"
    after = 2.0 + REMEMBERED_SECONDS
    assert len(calls.late(after)) == MAX_HOST + 1
    assert all(calls.begin(f"later {number}", "a", after, first=True) for number in range(2 * MAX_HOST))


def test_where_answers_are_read_at_once_slow_readers_are_a_crowd_as_well() -> None:
    calls = WaitingCalls(FIRST_SECONDS, later_counts=True)
    for number in range(MAX_HOST + 1):
        assert calls.begin(number, "a", 0.0, first=False)
    assert calls.late(CROWDED_SECONDS + 0.1) == list(range(MAX_HOST + 1))


def test_if_too_many_wait_those_of_the_host_with_most_end() -> None:
    calls = WaitingCalls(LATER_SECONDS, max_total=3 * MAX_HOST)
    for host, count in (("a", 1), ("b", MAX_HOST), ("c", MAX_HOST - 1), ("d", MAX_HOST - 1)):
        for number in range(count):
            assert calls.begin(f"{host}{number}", host, 0.0, first=True)
    assert calls.late(1.0) == []
    assert calls.begin("e0", "e", 1.0, first=True)
    assert calls.begin("f0", "f", 1.0, first=True)
    assert calls.late(1.0) == [f"b{number}" for number in range(MAX_HOST)]
    assert calls.late(1.0) == []


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:4711", "10.0.0.1"), ("ipv6:%5Bfd00::1%5D:4711", "fd00::1"), ("unix:/tmp/x", "")],
)
def test_the_host_of_a_call(peer: str, host: str) -> None:
    assert host_of_call(peer) == host
