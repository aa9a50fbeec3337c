"""Limits of rates, such as of requests by host or of log lines by module. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RateLimits(Generic[K]):
    """The same limit for each of several keys: `burst` at once, and `per_second` on average.

    It is a token bucket that is full at first, kept as the time until which a key's share is used up (ITU-T
    I.371's generic cell rate algorithm). Times are in seconds, of a clock that never goes back.
    """

    def __init__(self, per_second: float, burst: float, max_keys: int | None = None) -> None:
        """Set the limits. With `max_keys`, no more keys are admitted until one has been quiet."""
        self._per_second, self._burst, self._max_keys = per_second, burst, max_keys
        self._used_until: dict[K, float] = {}

    def admits(self, key: K, now: float) -> bool:
        """Return whether one more is within the limit, and count it if it is."""
        if key not in self._used_until and len(self._used_until) == self._max_keys:
            self._used_until = {earlier: until for earlier, until in self._used_until.items() if until > now}
            if len(self._used_until) == self._max_keys:
                return False
        until = max(self._used_until.get(key, now), now)
        if (until - now) * self._per_second > self._burst - 0.99:  # and not 1: times are rounded
            return False
        self._used_until[key] = until + 1 / self._per_second
        return True
