"""Log lines of which many come at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest

from checkmate.events.event_log import EventLog
from checkmate.events.kinds import STREAM_FAILED, STREAM_REFUSED, Occurrence
from checkmate.events.process_log import keep_in
from checkmate.output.log_lines import (
    ROW_ITERATIONS,
    GatheredLog,
    Repetition,
    StrangerLog,
    TextLines,
    first_and_count,
)
from tests.support.waiting import wait_until


def failed(lines: Sequence[str]) -> Occurrence:
    return STREAM_FAILED(count=len(lines), why=lines[0])


def test_what_comes_together_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gathered = GatheredLog(logging.WARNING, first_and_count, failed)

    def add() -> None:
        for _ in range(256):
            gathered.add("a stream: lost")

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.messages == []
    wait_until(lambda: caplog.messages)
    time.sleep(1)
    assert caplog.messages == ["a stream: lost (and 2,047 more like this)"]
    gathered.add("another: lost")
    wait_until(lambda: len(caplog.messages) == 2)
    assert caplog.messages[1] == "another: lost"


def test_nothing_is_lost_or_told_twice_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    gathered = GatheredLog(logging.WARNING, first_and_count, failed)
    gathered.add("first")
    gathered.flush()
    gathered.flush()
    assert caplog.messages == ["first"]
    time.sleep(0.7)
    assert caplog.messages == ["first"]


def test_a_line_comes_even_if_events_do_not_end(caplog: pytest.LogCaptureFixture) -> None:
    gathered = GatheredLog(logging.WARNING, first_and_count, failed)
    start = time.monotonic()
    while not caplog.messages:
        gathered.add("again")
        time.sleep(0.05)
        assert time.monotonic() - start < 20
    assert time.monotonic() - start > 4


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    strangers = StrangerLog()
    for _ in range(1000):
        strangers.line("x" * 1000)
    assert len(caplog.messages) == 10
    assert max(map(len, caplog.messages)) == 300
    time.sleep(1.1)
    strangers.line("later")
    assert caplog.messages[-1] == "later (and 990 more since the last such line)"


def test_strangers_cannot_fill_the_event_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = EventLog("controller")
    keep_in(log)
    try:
        strangers = StrangerLog()
        for _ in range(600):  # ten minutes
            strangers.line("refused", lambda why, count: STREAM_REFUSED(switch="s1", count=count, why=why))
            now[0] += 1
        strangers.line("no event")
    finally:
        keep_in(None)
    events = log.read().events
    assert {(event.name, event.message, event.fields["why"]) for event in events} == {
        ("stream.refused", "refused", "refused")
    }
    assert [event.fields["count"] for event in events] == [1, *[60] * 9]


def test_what_repeats_is_logged_more_and_more_rarely() -> None:
    repetition = Repetition()
    counts = {
        number: left_out for number in range(1, 1001) if (left_out := repetition.again(number)) is not None
    }
    assert counts == {1: 0, 10: 8, 100: 89, 1000: 899}


def test_the_end_of_what_repeats_is_logged_with_what_was_left_out() -> None:
    repetition = Repetition()
    assert [repetition.again(number) for number in range(5)] == [0, None, None, None, None]
    assert (repetition.over(), repetition.over()) == (4, None)
    assert [repetition.again(5), repetition.over()] == [None, None], (
        "what comes and goes is a repetition, too"
    )
    assert repetition.again(6 + ROW_ITERATIONS) == 1, "after a while it is new"


def test_a_text_of_others_neither_forges_a_line_of_the_log_nor_steers_a_terminal() -> None:
    name = "a.yaml\n2026-01-01 00:00:00 all is well\x1b[2J\u202e"
    record = logging.makeLogRecord({"msg": "%s: gone", "args": (name,)})
    lines = TextLines("%(asctime)s %(message)s", "%H:%M:%S").format(record).split("\n")
    assert lines[1:] == ["  2026-01-01 00:00:00 all is well\\x1b[2J\\u202e: gone"]
