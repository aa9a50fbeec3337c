"""Limits of calls that wait for their clients: too many of them, or too long a wait."""

from __future__ import annotations

import pytest

from checkmate.base.waiting_calls import (
    CROWDED_SECONDS,
    FIRST_SECONDS,
    MAX_HOST,
    MAX_TOTAL,
    REMEMBERED_SECONDS,
    CrowdsRefused,
    OldestEnds,
    host_of_call,
)

LATER_SECONDS = 60.0


def test_calls_that_wait_for_long_end() -> None:
    calls = CrowdsRefused(LATER_SECONDS)
    assert calls.begin("first", "a", 0.0, first=True) == ()
    assert calls.begin("second", "a", 1.0, first=True) == ()
    assert calls.begin("later", "a", 0.0, first=False) == ()
    assert calls.late(FIRST_SECONDS) == []
    assert calls.late(FIRST_SECONDS + 0.5) == ["first"]
    assert calls.late(FIRST_SECONDS + 0.5) == []
    assert not calls.end("first")
    assert calls.end("second")
    assert calls.late(LATER_SECONDS) == []
    assert calls.late(LATER_SECONDS + 0.5) == ["later"]


def test_a_crowd_ends_soon_and_its_host_is_admitted_few_calls_for_a_while() -> None:
    calls = CrowdsRefused(LATER_SECONDS)
    for number in range(MAX_HOST):
        assert calls.begin(number, "a", 0.0, first=True) == ()
    assert calls.late(1.0) == [], "not a crowd yet"
    assert calls.begin("one more", "a", 1.0, first=True) == ()
    assert calls.begin("other", "b", 1.0, first=True) == ()
    assert calls.late(1.0 + CROWDED_SECONDS / 2) == list(range(MAX_HOST))
    admitted = [calls.begin(f"new {number}", "a", 2.0, first=True) for number in range(MAX_HOST)]
    assert admitted == [()] * (MAX_HOST - 1) + [None], "'one more' waits, too"
    assert calls.begin("at work", "a", 2.0, first=False) == (), "a call that has begun is not part of a crowd"
    after = 2.0 + REMEMBERED_SECONDS
    assert len(calls.late(after)) == MAX_HOST + 1
    begun = [calls.begin(f"later {number}", "a", after, first=True) for number in range(2 * MAX_HOST)]
    assert begun == [()] * 2 * MAX_HOST


def test_a_crowd_of_one_host_ends_its_oldest_call() -> None:
    calls = OldestEnds()
    assert calls.begin(100, "b", 0.0, first=True) == ()
    assert [calls.begin(call, "a", 1.0, first=True) for call in range(MAX_HOST)] == [()] * MAX_HOST
    assert calls.begin(MAX_HOST, "a", 2.0, first=False) == (0,), "those that do not read count as well"
    assert calls.begin(101, "b", 2.0, first=True) == ()
    assert not calls.end(0)
    assert calls.end(1)
    assert calls.begin(MAX_HOST + 1, "a", 3.0, first=True) == ()


def test_many_hosts_end_a_call_of_the_one_with_most() -> None:
    calls = OldestEnds()
    for host, count in (("a", 1), ("b", MAX_HOST), ("c", MAX_HOST - 1), ("d", MAX_TOTAL - 2 * MAX_HOST)):
        for number in range(count):
            assert calls.begin(f"{host}{number}", host, 0.0, first=True) == ()
    assert calls.begin("e0", "e", 0.0, first=True) == ("b0",)


def test_calls_end_that_wait_for_long_where_the_oldest_ends() -> None:
    calls = OldestEnds()
    calls.begin("first", "a", 0.0, first=True)
    calls.begin("second", "a", 1.0, first=False)
    assert calls.late(FIRST_SECONDS) == []
    assert calls.late(FIRST_SECONDS + 0.5) == ["first"]
    assert calls.late(FIRST_SECONDS + 0.5) == []
    assert not calls.end("first")
    assert calls.end("second")


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:4711", "10.0.0.1"), ("ipv6:%5Bfd00::1%5D:4711", "fd00::1"), ("unix:/tmp/x", "")],
)
def test_the_host_of_a_call(peer: str, host: str) -> None:
    assert host_of_call(peer) == host
