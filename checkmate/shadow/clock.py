"""A node's time, and for how long nothing has come to it. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

STALL = 0.5
"""Seconds without a beat after which the process is assumed to have been stopped."""


class AwakeClock:
    """A monotonic clock that stops unless `beat` is called several times per `STALL` seconds.

    A process that resumes after a stop has heard from nobody for a while and has read nothing. This does not
    mean that others are silent or that bytes are lost.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        """Read time, in seconds, from `read`, which must be monotonic."""
        self._read = read
        self._beaten = read()
        self._stopped = 0.0

    def now(self) -> float:
        """Return the time in seconds, without stops."""
        return min(self._read(), self._beaten + STALL) - self._stopped

    def beat(self) -> float:
        """Record that the process runs. Return the seconds that it was stopped since the last beat."""
        now = self._read()
        stopped = max(now - self._beaten - STALL, 0.0)
        self._beaten, self._stopped = now, self._stopped + stopped
        return stopped


class Silence:
    """The time since which some counters have stood still."""

    def __init__(self) -> None:
        self._counters: tuple[int, ...] | None = None
        self._since = 0.0

    def since(self, counters: tuple[int, ...], now: float, *, unread: bool = False) -> float:
        """Return the time at which these counters were first seen at these values, with nothing `unread`."""
        if unread or counters != self._counters:
            self._counters, self._since = counters, now
        return self._since
