"""The room that a node's streams have before gradients are lost. Pure.

A node waits for others only as long as there is room. With copies by a switch, which does not wait, it is
that of the sockets. With copies by hosts it is that of the trainers: they keep parts that a node does not
take, and tell with each for how long they have had it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from checkmate.shadow.logic.commit import PATIENCE
from checkmate.shadow.logic.hold import StreamState
from checkmate.wire.copies import kept_seconds

HURRY: Final = 0.5
"""Seconds. If a socket buffer lasts for less, holds do not wait for another shard."""
FULL: Final = 0.75
"""Share of a socket buffer. If it is fuller, holds do not wait either."""
SPARE: Final = 0.5
"""Share of a trainer's room that is left for what comes after a wait: the step, and reading the next part."""
_MEASURED_SECONDS: Final = 1.0


class Room(Protocol):
    """The room of a node's streams."""

    seconds: float
    """For how long there is room in the fullest one."""
    passes_laggards: bool
    """As `commit.Committee`."""

    def measure(self, streams: Iterable[StreamState], now: float) -> None:
        """Update it. Called ten times a second with all streams."""

    def is_short(self, streams: Iterable[StreamState]) -> bool:
        """Return whether there is hardly any room in one of these streams, which nobody reads."""
        ...


class SocketRoom:
    """The room of sockets: until the fullest one overflows at the present rate, measured once per second."""

    passes_laggards = False

    def __init__(self, now: float, receive_buffer: int) -> None:
        """Start to measure. `receive_buffer` is the size of a stream's socket buffer in bytes."""
        self.seconds = PATIENCE
        self._receive_buffer = receive_buffer
        self._measured = now
        self._counts: dict[int, int] = {}

    def measure(self, streams: Iterable[StreamState], now: float) -> None:
        """Measure the rate of each stream since the last measurement."""
        if now - self._measured < _MEASURED_SECONDS:
            return
        seconds, self._measured = now - self._measured, now
        lasts, positions = [PATIENCE], {}
        for stream in streams:
            positions[id(stream)] = stream.received_bytes
            rate = (stream.received_bytes - self._counts.get(id(stream), stream.received_bytes)) / seconds
            if rate > 0:
                lasts.append((self._receive_buffer - stream.queued) / rate)
        self._counts = positions
        self.seconds = max(0.0, min(lasts))

    def is_short(self, streams: Iterable[StreamState]) -> bool:
        """Return whether a socket's buffer is nearly full, or lasts for less than `HURRY`."""
        full = FULL * self._receive_buffer
        return self.seconds < HURRY or any(stream.queued > full for stream in streams)


class TrainerRoom:
    """The room of trainers: until one of them leaves out an iteration."""

    passes_laggards = True

    def __init__(self) -> None:
        self.seconds = PATIENCE

    def measure(self, streams: Iterable[StreamState], now: float) -> None:
        """Measure how long trainers will keep what is not read."""
        rest = (_room_seconds(stream) - stream.waited for stream in streams if stream.connected)
        self.seconds = max(0.0, min(rest, default=PATIENCE))

    def is_short(self, streams: Iterable[StreamState]) -> bool:
        """Return whether a trainer's room is half used."""
        return any(stream.waited > (1 - SPARE) * _room_seconds(stream) for stream in streams)


def _room_seconds(stream: StreamState) -> float:
    return min(PATIENCE, kept_seconds(stream.layout.nbytes, stream.period))
