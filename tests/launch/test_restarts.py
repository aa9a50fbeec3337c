"""Which ranks are started again."""

from __future__ import annotations

import signal

import pytest

from checkmate.launch.restarts import MAX_UNMET, MAX_UNTRAINED, Restarts, exit_words


def test_a_rank_that_has_met_the_others_is_started_again_up_to_a_limit() -> None:
    restarts = Restarts(5, patience=10)
    for _ in range(5):
        restarts.hear(1, "met", 0.0)
        restarts.hear(1, "trained", 0.0)
        assert restarts.end(1, -9) == ""
    restarts.hear(1, "met", 0.0)
    restarts.hear(1, "trained", 0.0)
    assert "rank 1 was killed by SIGKILL, and was started again 5 times already" in restarts.end(1, -9)
    assert restarts.end(0, 1) == ""


def test_a_rank_that_never_meets_the_others_is_given_up() -> None:
    restarts = Restarts(100, patience=10)
    assert [restarts.end(0, 1) for _ in range(MAX_UNMET - 1)] == [""] * (MAX_UNMET - 1)
    assert "rank 0 has ended with status 1, as 3 in a row did before" in restarts.end(0, 1)


def test_a_rank_that_never_trains_is_given_up_later() -> None:
    """Its restore fails each time, for example; deaths in recoveries are fewer."""
    restarts = Restarts(100, patience=10)
    for _ in range(MAX_UNTRAINED - 1):
        restarts.hear(0, "met", 0.0)
        assert restarts.end(0, 1) == ""
    restarts.hear(0, "met", 0.0)
    assert "as 6 in a row did before they had trained" in restarts.end(0, 1)
    for _ in range(20):
        restarts.hear(1, "met", 0.0)
        restarts.hear(1, "trained", 0.0)
        assert restarts.end(1, -9) == ""


def test_a_rank_that_cannot_go_on_is_not_started_again() -> None:
    restarts = Restarts(100, patience=10)
    restarts.hear(2, "met", 0.0)
    restarts.hear(2, "final", 1.0)
    assert restarts.end(2, 1) == "rank 2 has ended with status 1, and can't go on: see its error above"


def test_a_rank_is_done_once_all_are() -> None:
    restarts = Restarts(100, patience=10)
    assert not restarts.is_done(0)
    restarts.hear(0, "trained", 0.0)
    assert not restarts.is_done(0)
    restarts.hear(0, "concluded", 1.0)
    assert restarts.is_done(0)
    assert restarts.silent(12.0) == [0], "it may hang at its end"


def test_a_rank_is_silent_only_once_it_was_heard() -> None:
    restarts = Restarts(100, patience=10)
    restarts.hear(0, "alive", 100.0)
    restarts.hear(1, "alive", 105.0)
    assert restarts.silent(109.0) == []
    assert restarts.silent(111.0) == [0]
    restarts.hear(0, "end", 112.0)
    assert restarts.silent(114.0) == [], "the script goes on after its training"
    restarts.hear(0, "alive", 115.0)
    restarts.end(0, -9)
    assert restarts.silent(1000.0) == [1], "a new process has said nothing yet"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "has ended with status 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-70, "was killed by signal 70"),
    ],
)
def test_an_end_has_words(status: int, words: str) -> None:
    assert exit_words(status) == words
