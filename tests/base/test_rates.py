"""Limits of rates: bursts, averages, and the number of keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkmate.base.rates import RateLimits


def test_a_burst_at_once_and_then_the_average() -> None:
    limits = RateLimits[str](2, 10)
    assert [limits.admits("a", 5.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert limits.admits("b", 5.0)  # of its own
    assert [limits.admits("a", 6.0) for _ in range(3)] == [True, True, False]
    assert [limits.admits("a", 99.0) for _ in range(12)] == [True] * 10 + [False] * 2


def test_keys_are_bounded_until_one_is_quiet() -> None:
    limits = RateLimits[int](1, 3, max_keys=2)
    assert limits.admits(0, 0.0)
    assert limits.admits(1, 0.5)
    assert not limits.admits(2, 0.9)
    assert limits.admits(1, 0.9)  # known ones go on
    assert limits.admits(2, 1.5)  # 0 has been quiet


TIMES = st.lists(st.floats(0, 5, allow_nan=False), max_size=200).map(sorted)


@given(TIMES, st.integers(1, 50), st.integers(1, 50))
def test_no_more_than_burst_and_rate_in_any_interval(times: list[float], per_second: int, burst: int) -> None:
    limits = RateLimits[None](per_second, burst)
    admitted = [at for at in times if limits.admits(None, at)]
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= burst + per_second * (admitted[last] - admitted[first]) + 0.02


def test_the_burst_at_once_and_the_rate_in_the_long_run() -> None:
    limits = RateLimits[None](10, 20)
    assert sum(limits.admits(None, 100.0) for _ in range(1000)) == 20
    assert sum(limits.admits(None, 100.0 + n / 1000) for n in range(10_000)) in (99, 100)  # in 9.999 s
    assert limits.admits(None, 1e6)
