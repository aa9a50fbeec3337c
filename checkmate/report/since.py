"""`--since`: a time, or how long ago it was."""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

_UNITS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)")


def parse_since(text: str, now: float) -> float:
    """Return the seconds since the epoch of `2026-11-23T21:00:00Z`, `2026-11-23`, or `90min` before `now`.

    A time without a zone is local. Raises `ValueError` with what would be right.
    """
    if match := _AGO.fullmatch(text.strip()):
        return now - float(match[1]) * _UNITS[match[2]]
    try:
        return dt.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time; write 2026-11-23T21:00:00Z, or how long ago: 90min, 2h or 3d"
        ) from None
