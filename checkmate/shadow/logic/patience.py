"""For how long the fullest socket buffer lasts at the present rate. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from checkmate.shadow.logic.commit import PATIENCE
from checkmate.shadow.logic.hold_state import StreamState

_SECONDS = 1.0


class PatienceMeter:
    """Measures, once a second."""

    def __init__(self, now: float, receive_buffer: int) -> None:
        """`receive_buffer`: bytes of a stream's socket."""
        self.seconds = PATIENCE
        self._receive_buffer = receive_buffer
        self._measured = now
        self._received: dict[int, int] = {}

    def measure(self, streams: Iterable[StreamState], now: float) -> None:
        """See what has come since the last time."""
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
