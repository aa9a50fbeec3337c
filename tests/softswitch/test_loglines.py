"""The log's bounds, whatever strangers send."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator

import pytest

from softswitch.loglines import AT_ONCE, MAX_LINE, MAX_TRACEBACK, LineLimit


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """Yield what the loggers `noisy` and `quiet` have written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(LineLimit())
    loggers = [logging.getLogger(name) for name in ("noisy", "quiet")]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    yield stream
    for logger in loggers:
        logger.propagate = True
        logger.removeHandler(handler)


def test_lines_that_come_fast_are_left_out(output: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for number in range(1000):
        logging.getLogger("noisy").warning("line %d", number)
    logging.getLogger("quiet").warning("a line of another module")
    now[0] += 1
    for number in range(1000):
        logging.getLogger("noisy").warning("line %d", number)
    lines = output.getvalue().splitlines()
    assert lines[:AT_ONCE] == [f"line {number}" for number in range(AT_ONCE)]
    left_out = f"line 0 (and {1000 - AT_ONCE} more since the last such line)"
    assert lines[AT_ONCE:] == ["a line of another module", left_out]


def test_lines_are_short(output: io.StringIO) -> None:
    logging.getLogger("noisy").warning("%s", "a\n" * 100_000)
    try:
        raise ValueError("b" * 100_000)
    except ValueError:
        logging.getLogger("noisy").exception("it failed")
    first, second, *_ = output.getvalue().splitlines()
    assert (len(first), second) == (MAX_LINE, "it failed")
    assert len(output.getvalue()) < 2 * MAX_LINE + MAX_TRACEBACK
