"""Time as a shadow node lives it: a process that was stopped has not waited meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

STALL = 0.5
"""Seconds without a beat, after which the process is taken to have been stopped."""


class AwakeClock:
    """A monotonic clock that stands still while nobody beats it.

    A process that goes on after a stop has heard nobody for long, and has read nothing. Neither is a sign
    that others are silent or that bytes are lost. `beat` is called several times each `STALL` seconds.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        """`read`: seconds, never less than before."""
        self._read = read
        self._beaten = read()
        self._stopped = 0.0

    def now(self) -> float:
        """Return the seconds lived."""
        return min(self._read(), self._beaten + STALL) - self._stopped

    def beat(self) -> float:
        """Say that the process runs. Return for how many seconds it has been stopped since the last beat."""
        now = self._read()
        stopped = max(now - self._beaten - STALL, 0.0)
        self._beaten, self._stopped = now, self._stopped + stopped
        return stopped
