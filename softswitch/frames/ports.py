"""Ports: what they carry beside a frame's bytes, what they count, and the in-memory kind for tests.

A port knows nothing of programs. `afpacket` has the kind that is a network interface.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from softswitch.frames.checksums import Offload, complete

log = logging.getLogger(__name__)

REFUSAL_LIMIT_S = 1.0
"""A port that has refused copies for so long counts as not connected."""
RETRY_S = 0.1
"""How often a port that is not connected is tried again."""


@dataclass(slots=True)
class PortStats:
    """What a port has counted since it was opened.

    Segments count a 64 KB frame as the frames that it is on a wire. Copies that did not leave:
    `refused` by a port that was full, and `withheld` by admission for that: their sender's TCP sends again.
    `disconnected`, to a port that counts as not connected, and `unsendable`, whose checksum could not be
    completed: lost. `oversized` frames did not enter.
    """

    rx_packets: int = 0
    rx_bytes: int = 0
    rx_segments: int = 0
    tx_packets: int = 0
    tx_bytes: int = 0
    tx_segments: int = 0
    refused: int = 0
    disconnected: int = 0
    withheld: int = 0
    unsendable: int = 0
    oversized: int = 0


Handler = Callable[[int, bytes, Offload | None], None]
"""Takes a received frame: port number, bytes, and what is left to do for it."""


class Port(Protocol):
    """What the switch asks of a port."""

    number: int
    name: str
    stats: PortStats

    def fileno(self) -> int:
        """A descriptor that is readable when a frame waits."""

    def poll(self, handle: Handler, limit: int) -> None:
        """Hand at most `limit` waiting frames to `handle`."""

    def send(self, frame: bytes, offload: Offload | None) -> bool:
        """Send a frame; `False` when the port refused it and so holds the original back (admission)."""

    def dropped(self) -> int:
        """Frames that came, and were dropped before the switch took them."""

    def close(self) -> None:
        """Let go of what the port holds."""


class PortConnection:
    """Whether a port counts as connected (design, section 4).

    Logs a warning when it no longer does, and when it does again: meanwhile copies to it are lost. `port`
    is what the warnings call it.
    """

    __slots__ = ("_port", "_retry", "_since", "healthy", "up")

    def __init__(self, port: str = "a port") -> None:
        self._port = port
        self.up = True
        self.healthy = True
        """Up, and the last copy was accepted: nothing needs to be asked before sending."""
        self._since = 0.0
        self._retry = 0.0
        """When to try again, once the port counts as not connected; before that 0."""

    def usable(self) -> bool:
        """Whether to try a copy on this port now."""
        if self.healthy or not self.up:
            return self.up
        if not self._retry:
            return True
        now = time.monotonic()
        if now < self._retry:
            return False
        self._retry = now + RETRY_S
        return True

    def accepted(self) -> None:
        """The port took a copy."""
        if self._retry:
            log.warning("%s takes frames again, and counts as connected", self._port)
        self._since = self._retry = 0.0
        self.healthy = self.up

    def refused(self) -> bool:
        """The port refused a copy; whether that holds the original back."""
        now = time.monotonic()
        self.healthy = False
        if not self._retry:
            # Quiet times count too: a sender that backs off tries ever more rarely.
            self._since = self._since or now
            if now - self._since < REFUSAL_LIMIT_S:
                return True
            log.warning(
                "%s has taken no frame for %.1f s: it counts as not connected, and copies to it are dropped",
                self._port,
                now - self._since,
            )
        self._retry = now + RETRY_S
        return False

    def set_up(self, up: bool) -> None:
        """The link went up or down, or is as it was."""
        if self.up and not up and not self._retry:
            log.warning("%s is down: it counts as not connected, and copies to it are dropped", self._port)
        if up and not self.up:
            log.warning("%s is up again, and counts as connected", self._port)
            self._since = self._retry = 0.0
        self.up = up
        self.healthy = up and not self._since


class MemoryPort:
    """A port of two queues. Tests put frames in with `inject`, and find in `sent` what left.

    `capacity` bounds `sent`; a full port, or one with `refusing` set, refuses copies as a socket does.
    """

    def __init__(self, number: int, name: str = "", capacity: int = 1 << 16) -> None:
        self.number = number
        self.name = name or f"memory{number}"
        self.stats = PortStats()
        self.sent: deque[bytes] = deque()
        self.capacity = capacity
        self.refusing = False
        self.connection = PortConnection(f"port {number} ({self.name})")
        self._waiting: deque[tuple[bytes, Offload | None]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        """The descriptor that `inject` makes readable."""
        return self._event

    def inject(self, frame: bytes, offload: Offload | None = None) -> None:
        """Let a frame arrive."""
        # The count first: it may exceed the frames that wait for a moment, and never fall short of them.
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
        """Queue a frame, its checksum completed; `False` when the port refused it."""
        stats = self.stats
        if not self.connection.usable():
            stats.disconnected += 1
            return True
        if self.refusing or len(self.sent) >= self.capacity:
            if self.connection.refused():
                stats.refused += 1
                return False
            stats.disconnected += 1
            return True
        self.connection.accepted()
        whole = frame if offload is None else complete(frame)
        if whole is None:
            stats.unsendable += 1
            return True
        self.sent.append(whole)
        stats.tx_packets += 1
        stats.tx_bytes += len(whole)
        stats.tx_segments += offload.segments() if offload else 1
        return True

    def dropped(self) -> int:
        """None: what is injected waits until it is taken."""
        return 0

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._event)
