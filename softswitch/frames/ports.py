"""Ports: their protocol, counters and connection state.

Ports are independent of programs. `afpacket` has ports that are network interfaces.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from softswitch.frames.checksums import Offload

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

    def drop_count(self) -> int:
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
        """True if the port is up and accepted the last copy, so that copies need no check."""
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

    def note_accepted(self) -> None:
        """Note that the port accepted a copy."""
        if self._retry:
            log.warning("%s accepts frames again, and counts as connected", self._port)
        self._since = self._retry = 0.0
        self.healthy = self.up

    def note_refused(self) -> bool:
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
