"""Limits of calls that wait for their clients: too many of them, or too long a wait."""

from __future__ import annotations

from softswitch.p4runtime.waits import HOST_MAX, PATIENCE_S, TOTAL_MAX, Waits


def test_a_crowd_of_one_host_ends_its_oldest_call() -> None:
    waits: Waits[int] = Waits()
    assert waits.begin(100, "b", 0.0) is None
    assert [waits.begin(each, "a", 1.0) for each in range(HOST_MAX)] == [None] * HOST_MAX
    assert waits.begin(HOST_MAX, "a", 2.0) == 0
    assert waits.begin(101, "b", 2.0) is None
    assert not waits.end(0)
    assert waits.end(1)
    assert waits.begin(HOST_MAX + 1, "a", 3.0) is None


def test_many_hosts_end_a_call_of_the_one_with_most() -> None:
    waits: Waits[str] = Waits()
    for host, count in (("a", 1), ("b", HOST_MAX), ("c", HOST_MAX - 1), ("d", TOTAL_MAX - 2 * HOST_MAX)):
        for each in range(count):
            assert waits.begin(f"{host}{each}", host, 0.0) is None
    assert waits.begin("e0", "e", 0.0) == "b0"


def test_calls_that_wait_for_long_end() -> None:
    waits: Waits[str] = Waits()
    waits.begin("first", "a", 0.0)
    waits.begin("second", "a", 1.0)
    assert waits.late(PATIENCE_S) == []
    assert waits.late(PATIENCE_S + 0.5) == ["first"]
    assert waits.late(PATIENCE_S + 0.5) == []
    assert not waits.end("first")
    assert waits.end("second")
