"""Log lines of which many may come at once: one for all, or a bounded number."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from checkmate.base.wording import printable
from checkmate.events.kinds import Occurrence
from checkmate.events.process_log import say

T = TypeVar("T")

ROW_ITERATIONS: Final = 100
"""An occurrence is logged again if there was none for this number of iterations."""
_POWERS: Final = frozenset(10**power for power in range(18))
MAX_LINE: Final = 300
"""Characters of a log line about a stranger."""
EVENT_SECONDS: Final = 60.0
"""Least time between two events that strangers cause."""
_LINES_AT_ONCE: Final = 10
_QUIET: Final = 0.5
_MAX_WAIT: Final = 5.0

_log: Final = logging.getLogger("checkmate")


class TextLines(logging.Formatter):
    """Formats records for people. Further lines of one are indented, and nothing in it steers a terminal.

    So a text of somebody else, such as the name of a file, can't look like a line of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines, without their end."""
        return printable(super().format(record), "\n").replace("\n", "\n  ")


class GatheredLog(Generic[T]):
    """One log line for events of a kind: once none has come for half a second, or after five. Thread-safe."""

    def __init__(
        self, level: int, line: Callable[[Sequence[T]], str], event: Callable[[Sequence[T]], Occurrence]
    ) -> None:
        """Gather events for lines of `level`; `line` makes one of at least one, and `event` its event."""
        self._level = level
        self._line = line
        self._event = event
        self._lock = threading.Lock()
        self._events: list[T] = []
        self._first = self._newest = 0.0

    def add(self, event: T) -> None:
        """Add an event to the next line."""
        with self._lock:
            self._newest = time.monotonic()
            self._events.append(event)
            if len(self._events) == 1:
                self._first = self._newest
                self._wake(_QUIET)

    def flush(self) -> None:
        """Log what has come so far."""
        with self._lock:
            events, self._events = self._events, []
        if events:
            say(self._level, self._event(events), "%s", self._line(events))

    def _wake(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._log_if_quiet)
        timer.daemon = True
        timer.start()

    def _log_if_quiet(self) -> None:
        with self._lock:
            wait = min(self._newest + _QUIET, self._first + _MAX_WAIT) - time.monotonic()
            if self._events and wait > 0:
                self._wake(wait)
                return
        self.flush()


def first_and_count(lines: Sequence[str]) -> str:
    """Return the first of some lines about streams, and the number of the others."""
    rest = len(lines) - 1
    return f"{lines[0]} (and {rest:,} more like this)" if rest else lines[0]


def left_out_words(count: int) -> str:
    """Return what a line adds about those like it that were left out before it."""
    return f" ({count:,} more like this since the last such line)" if count else ""


class Repetition:
    """Something that may happen again at each iteration: which of its occurrences to log. Not thread-safe.

    The 1st, 10th, 100th and so on in a row: until none has come for `ROW_ITERATIONS`.
    """

    def __init__(self) -> None:
        self._count = self._left_out = 0
        self._newest = -1
        self._has_logged = False

    def again(self, iteration: int) -> int | None:
        """Note that it has happened. Return how many were left out before it, or `None` to leave it out."""
        if iteration - self._newest > ROW_ITERATIONS:
            self._count = 0
        self._count, self._newest = self._count + 1, iteration
        if self._count not in _POWERS:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        self._has_logged = True
        return left_out

    def over(self) -> int | None:
        """Note that it is over. Return how many were left out, or `None` if this is not worth a line.

        It is not if all that has happened since it was over before was left out, too.
        """
        if not self._has_logged:
            return None
        left_out, self._left_out = self._left_out, 0
        self._has_logged = False
        return left_out


class StrangerLog:
    """Log lines that strangers cause: a few at once, then at most one a second, each of bounded length.

    Events are rarer, so that they do not push others out of the event log: one a minute, with a count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._full = 0.0  # when as many lines as at the beginning may be logged again
        self._left_out = 0
        self._uncounted = 0  # since the last event
        self._next_event = 0.0

    def line(self, text: str, event: Callable[[str, int], Occurrence] | None = None) -> None:
        """Log a line, or count it for the next one.

        `event` makes an event of the words, and of how many there have been since the event before.
        """
        with self._lock:
            now = time.monotonic()
            self._uncounted += event is not None
            if self._full > now + _LINES_AT_ONCE - 1:
                self._left_out += 1
                return
            self._full, left_out = max(self._full, now) + 1.0, self._left_out
            self._left_out = 0
            event_count = 0
            if event is not None and now >= self._next_event:
                event_count, self._uncounted, self._next_event = self._uncounted, 0, now + EVENT_SECONDS
        words = text[:MAX_LINE]
        more = f" (and {left_out} more since the last such line)" if left_out else ""
        if event is not None and event_count:
            say(logging.INFO, event(words, event_count), "%s%s", words, more)
        else:
            _log.info("%s%s", words, more)
