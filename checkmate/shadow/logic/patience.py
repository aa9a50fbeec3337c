"""Time until the fullest socket buffer overflows at the present rate. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from checkmate.shadow.logic.commit import PATIENCE
from checkmate.shadow.logic.hold import StreamState

_SECONDS = 1.0


class PatienceMeter:
    """Measurement of patience, once per second."""

    def __init__(self, now: float, receive_buffer: int) -> None:
        """Start to measure. `receive_buffer` is the size of a stream's socket buffer in bytes."""
        self.seconds = PATIENCE
        self._receive_buffer = receive_buffer
        self._measured = now
        self._received: dict[int, int] = {}

    def measure(self, streams: Iterable[StreamState], now: float) -> None:
        """Measure the rate of each stream since the last call."""
        if now - self._measured < _SECONDS:
            return
        passed, self._measured = now - self._measured, now
        lasts, seen = [PATIENCE], {}
        for stream in streams:
            seen[id(stream)] = stream.received
            rate = (stream.received - self._received.get(id(stream), stream.received)) / passed
            if rate > 0:
                lasts.append((self._receive_buffer - stream.queued) / rate)
        self._received = seen
        self.seconds = max(0.0, min(lasts))
