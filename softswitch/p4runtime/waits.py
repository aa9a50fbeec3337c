"""Calls that wait for their clients, and which of them must end. Pure.

A client that opens calls and sends nothing, or reads nothing, would otherwise keep a worker with each. A call
with its request waits for microseconds only, so those that have waited for longest end first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

PATIENCE_S = 5.0
"""Seconds for which a call may wait for its client."""
MAX_HOST = 8
"""Calls of one host that may wait at a time."""
MAX_TOTAL = 24
"""Calls of all hosts that may wait at a time."""


class Waits(Generic[K]):
    """All calls that wait at the moment, by key."""

    def __init__(self) -> None:
        self._waits: dict[K, tuple[str, float]] = {}  # host and time, the oldest first

    def begin(self, key: K, host: str, now: float) -> K | None:
        """Record that a call waits; return, and forget, another that must end because too many wait."""
        counts = Counter(host for host, _ in self._waits.values())
        crowd = None
        if counts[host] >= MAX_HOST:
            crowd = host
        elif len(self._waits) >= MAX_TOTAL:
            ((crowd, _),) = counts.most_common(1)
        crowding_key = next((key for key, (host, _) in self._waits.items() if host == crowd), None)
        if crowding_key is not None:
            del self._waits[crowding_key]
        self._waits[key] = host, now
        return crowding_key

    def end(self, key: K) -> bool:
        """Record that a call does not wait any more; return false if it had to end."""
        return self._waits.pop(key, None) is not None

    def late(self, now: float) -> list[K]:
        """Return, and forget, the calls that have waited too long."""
        late_keys = [key for key, (_, since) in self._waits.items() if now - since > PATIENCE_S]
        for key in late_keys:
            del self._waits[key]
        return late_keys
