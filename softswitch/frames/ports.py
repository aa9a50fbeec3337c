"""Ports: their protocol, counters and connection state, and ports in memory for tests.

Ports are independent of programs. `afpacket` has ports that are network interfaces.
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
"""Seconds after which a port that refuses copies counts as not connected."""
RETRY_S = 0.1
"""Seconds between two attempts at a port that is not connected."""


@dataclass(slots=True)
class PortStats:
    """Counters of a port since it was opened.

    In segments, a 64 KB frame counts as its frames on a wire. The sender's TCP retransmits copies that were
    `refused` by a full port, or `withheld` by admission for that reason. Other copies are lost: those to a
    port that counts as not connected (`disconnected`), and those whose checksum could not be completed
    (`unsendable`). `oversized` frames did not enter the switch.
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
"""Handler of a received frame: port number, bytes, and deferred work."""


class Port(Protocol):
    """The switch's interface to a port."""

    number: int
    name: str
    stats: PortStats

    def fileno(self) -> int:
        """Return a descriptor that is readable when a frame waits."""

    def poll(self, handle: Handler, limit: int) -> None:
        """Hand at most `limit` waiting frames to `handle`."""

    def send(self, frame: bytes, offload: Offload | None) -> bool:
        """Send a frame; `False` when the port refused it and so holds the original back (admission)."""

    def dropped(self) -> int:
        """Return the number of received frames that were dropped before the switch."""

    def close(self) -> None:
        """Release the port's resources."""


class PortConnection:
    """Connection state of a port (design, section 4).

    A warning is logged at each change, because copies to a port that is not connected are lost. `port` is its
    name in warnings.
    """

    __slots__ = ("_port", "_retry", "_since", "healthy", "up")

    def __init__(self, port: str = "a port") -> None:
        self._port = port
        self.up = True
        self.healthy = True
        """Whether it is up and accepted the last copy, so that copies can be sent without a check."""
        self._since = 0.0
        self._retry = 0.0
        """Time of the next attempt if the port counts as not connected, else 0."""

    def usable(self) -> bool:
        """Return whether to try a copy on this port now."""
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
        """Note that the port accepted a copy."""
        if self._retry:
            log.warning("%s accepts frames again, and counts as connected", self._port)
        self._since = self._retry = 0.0
        self.healthy = self.up

    def refused(self) -> bool:
        """Note that the port refused a copy; return whether that withholds the original."""
        now = time.monotonic()
        self.healthy = False
        if not self._retry:
            # Idle times count too, because a sender that backs off retries less and less often.
            self._since = self._since or now
            if now - self._since < REFUSAL_LIMIT_S:
                return True
            log.warning(
                "%s accepted no frame for %.1f s: it counts as not connected, and copies to it are dropped",
                self._port,
                now - self._since,
            )
        self._retry = now + RETRY_S
        return False

    def set_up(self, up: bool) -> None:
        """Set whether the link is up."""
        if self.up and not up and not self._retry:
            log.warning("%s is down: it counts as not connected, and copies to it are dropped", self._port)
        if up and not self.up:
            log.warning("%s is up again, and counts as connected", self._port)
            self._since = self._retry = 0.0
        self.up = up
        self.healthy = up and not self._since


class MemoryPort:
    """A port of two queues for tests: `inject` adds received frames, and `sent` has sent frames.

    `capacity` is the limit of `sent`. A port that is full, or has `refusing` set, refuses copies like a
    socket.
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
        """Return 0: injected frames wait until they are polled."""
        return 0

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._event)
