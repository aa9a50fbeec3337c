"""A port of the embedded target without a network interface."""

from __future__ import annotations

import os
from collections import deque

from softswitch.frames.checksums import Offload, complete
from softswitch.frames.ports import Handler, PortConnection, PortStats


class MemoryPort:
    """A port of two queues: `inject` adds received frames, and `output` has sent frames.

    `capacity` is the limit of `output`. A port that is full, or has `refusing` set, refuses copies like a
    socket.
    """

    def __init__(self, number: int, name: str = "", capacity: int = 1 << 16) -> None:
        self.number = number
        self.name = name or f"memory{number}"
        self.stats = PortStats()
        self.output: deque[bytes] = deque()
        self.capacity = capacity
        self.refusing = False
        self.connection = PortConnection(f"port {number} ({self.name})")
        self._waiting: deque[tuple[bytes, Offload | None]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        """Return the descriptor that `inject` makes readable."""
        return self._event

    def inject(self, frame: bytes, offload: Offload | None = None) -> None:
        """Add a received frame."""
        # The count first: it may briefly exceed the number of waiting frames, but never be less.
        os.eventfd_write(self._event, 1)
        self._waiting.append((frame, offload))

    def poll(self, handle: Handler, limit: int) -> None:
        """Hand at most `limit` waiting frames to `handle`."""
        for _ in range(min(limit, len(self._waiting))):
            os.eventfd_read(self._event)
            frame, offload = self._waiting.popleft()
            self.stats.rx_packets += 1
            self.stats.rx_bytes += len(frame)
            self.stats.rx_segments += offload.segments() if offload else 1
            handle(self.number, frame, offload)

    def send(self, frame: bytes, offload: Offload | None) -> bool:
        """Queue a frame with a complete checksum; return `False` if the port refused it."""
        stats = self.stats
        if not self.connection.usable():
            stats.disconnected += 1
            return True
        if self.refusing or len(self.output) >= self.capacity:
            if self.connection.note_refused():
                stats.refused += 1
                return False
            stats.disconnected += 1
            return True
        self.connection.note_accepted()
        whole = frame if offload is None else complete(frame)
        if whole is None:
            stats.unsendable += 1
            return True
        self.output.append(whole)
        stats.tx_packets += 1
        stats.tx_bytes += len(whole)
        stats.tx_segments += offload.segments() if offload else 1
        return True

    def drop_count(self) -> int:
        """Return 0: injected frames wait until they are polled."""
        return 0

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._event)
