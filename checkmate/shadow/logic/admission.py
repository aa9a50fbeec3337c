"""Calls that wait for their client: which of them have waited too long. Pure.

A client that opens calls and sends no request would otherwise keep a worker with each. A few may wait for
long, because a network may be slow; many of one host may not.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

REQUEST_SECONDS: Final = 5.0
"""How long a call may wait for its request."""
IDLE_SECONDS: Final = 60.0
"""How long a stream that has begun may wait for its client to send or to read."""
CROWD: Final = 8
"""If a host has, or had lately, more calls without a request, they have `CROWDED_SECONDS`."""
CROWDED_SECONDS: Final = 0.25
REMEMBERED_SECONDS: Final = 10.0
"""How long a host that was a crowd may not have more than `CROWD` calls without a request."""


@dataclass(slots=True)
class _Wait:
    host: str
    since: float
    first: bool


class WaitingCalls:
    """All calls that wait for their clients at the moment, by key."""

    def __init__(self) -> None:
        self._waits: dict[Hashable, _Wait] = {}
        self._crowds: dict[str, float] = {}  # when a host was last a crowd

    def begin(self, key: Hashable, host: str, now: float) -> bool:
        """Record a new call, which waits for its request. Return false if its host has too many already."""
        crowded = now - self._crowds.get(host, -REMEMBERED_SECONDS) < REMEMBERED_SECONDS
        if crowded and self._count(host) >= CROWD:
            return False
        self._waits[key] = _Wait(host, now, first=True)
        return True

    def wait(self, key: Hashable, host: str, now: float) -> None:
        """Record that a call that has begun waits for its client."""
        self._waits[key] = _Wait(host, now, first=False)

    def done(self, key: Hashable) -> None:
        """Record that a call does not wait any more."""
        self._waits.pop(key, None)

    def late(self, now: float) -> list[Hashable]:
        """Return, and forget, the calls that have waited too long."""
        self._crowds = {host: at for host, at in self._crowds.items() if now - at < REMEMBERED_SECONDS}
        found = [key for key, one in self._waits.items() if now - one.since > self._patience(one)]
        for host in {self._waits[key].host for key in found if self._count(self._waits[key].host) > CROWD}:
            self._crowds[host] = now
        for key in found:
            del self._waits[key]
        return found

    def _patience(self, one: _Wait) -> float:
        if not one.first:
            return IDLE_SECONDS
        crowded = one.host in self._crowds or self._count(one.host) > CROWD
        return CROWDED_SECONDS if crowded else REQUEST_SECONDS

    def _count(self, host: str) -> int:
        return sum(one.first and one.host == host for one in self._waits.values())
