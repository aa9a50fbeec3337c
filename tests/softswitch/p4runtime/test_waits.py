"""Limits of calls that wait for their clients: too many of them, or too long a wait."""

from __future__ import annotations

from softswitch.p4runtime.waits import MAX_HOST, MAX_TOTAL, PATIENCE_S, Waits


def test_a_crowd_of_one_host_ends_its_oldest_call() -> None:
    waits: Waits[int] = Waits()
    assert waits.begin(100, "b", 0.0) is None
    assert [waits.begin(call, "a", 1.0) for call in range(MAX_HOST)] == [None] * MAX_HOST
    assert waits.begin(MAX_HOST, "a", 2.0) == 0
    assert waits.begin(101, "b", 2.0) is None
    assert not waits.end(0)
    assert waits.end(1)
    assert waits.begin(MAX_HOST + 1, "a", 3.0) is None


def test_many_hosts_end_a_call_of_the_one_with_most() -> None:
    waits: Waits[str] = Waits()
    for host, count in (("a", 1), ("b", MAX_HOST), ("c", MAX_HOST - 1), ("d", MAX_TOTAL - 2 * MAX_HOST)):
        for number in range(count):
            assert waits.begin(f"{host}{number}", host, 0.0) is None
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
