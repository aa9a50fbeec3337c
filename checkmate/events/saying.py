"""`say`: a line of the log for people, and the event that it tells of, for the event log of this process."""

from __future__ import annotations

import logging
import time
from typing import Final, Protocol

from checkmate.events.kinds import Happened

_log: Final = logging.getLogger("checkmate")


class Keeper(Protocol):
    """What keeps events."""

    def keep(self, happened: Happened, level: int, message: str) -> None:
        """Keep an event, without blocking."""


class _Kept:
    """The keeper of this process."""

    keeper: Keeper | None = None


def keep_in(keeper: Keeper | None) -> None:
    """Have all events of this process kept from now on; `None`: by nobody."""
    _Kept.keeper = keeper


def say(level: int, happened: Happened, message: str, *args: object) -> None:
    """Log a line about an event, if the log has this level, and keep the event in any case.

    An event that has no line for people is said at level DEBUG.
    """
    record = _log.makeRecord(
        _log.name, level, __file__, 0, message, args, None, extra={"event": happened}, func="say"
    )
    if _log.isEnabledFor(level):
        _log.handle(record)
    if _Kept.keeper is not None:
        _Kept.keeper.keep(happened, level, record.getMessage())


def seconds_since(began: float) -> float:
    """Return how long something took that began at that `time.monotonic()`, in milliseconds' precision."""
    return round(time.monotonic() - began, 3)
