"""`--since`: a time, or how long ago it was."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

from checkmate.events.reading import MAX_TIME

_UNITS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_AGO: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d)")


def parse_since(text: str, now: float) -> float:
    """Return the seconds since the epoch of `2026-11-23T21:00:00Z`, `2026-11-23`, or `90min` before `now`.

    A time without a zone is local. Raises `ValueError` with what would be right.
    """
    try:
        if match := _AGO.fullmatch(text.strip()):
            since = now - float(match[1]) * _UNITS[match[2]]
        else:
            since = dt.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        since = -1.0
    if not 0 <= since < MAX_TIME:  # no event has another one
        raise ValueError(
            f"{text!r} is not a time; write 2026-11-23T21:00:00Z, or how long ago: 90min, 2h or 3d"
        )
    return since
