"""Segments that wait for an answer: those of known shadow NICs first, and strangers' up to a rate. Pure."""

from __future__ import annotations

from collections import deque
from ipaddress import IPv4Address
from typing import Final

from checkmate.base.rates import RateLimits
from controlplane.endpoint.endpoint import View
from controlplane.endpoint.frames import Segment, SegmentKind
from controlplane.entities import Rate
from controlplane.stub import STRANGER_RATE

KNOWN_DEPTH: Final = 1024
"""Segments of one shadow NIC that wait. A node may connect all of its streams at once."""


class WaitingSegments:
    """Segments with the port at which each arrived, in bounded queues.

    Each known NIC has a queue, served in turn, so that a flood fills only its own. Strangers have what is
    left, and a rate for each port: the same as at the switch, so it matters only if that lets more through.
    Segments that do not fit are dropped and counted, because TCP retransmits them.
    """

    def __init__(self, rate: Rate = STRANGER_RATE) -> None:
        self._known_nics: dict[IPv4Address, deque[tuple[Segment, int]]] = {}
        self._strangers: deque[tuple[Segment, int]] = deque()
        self._rates = RateLimits[int](rate.packets, rate.burst)  # of each port
        self.dropped = 0

    def put(self, segment: Segment, port: int, view: View, now: float) -> None:
        """Add a segment, or drop it.

        Args:
            segment: The segment.
            port: The port at which it arrived.
            view: The present state of the switch.
            now: The time in seconds, of a clock that never goes back.
        """
        if segment.kind is SegmentKind.RST and view.connected.find_peer(segment) is None:
            return  # of no connection: there is nothing to do
        if view.knows(segment, port):
            queue = self._known_nics.setdefault(segment.ip, deque())
            fits = len(queue) < KNOWN_DEPTH
        else:
            queue = self._strangers
            fits = self._rates.admits(port, now)
        if fits:
            queue.append((segment, port))
        else:
            self.dropped += 1

    def take(self, limit: int) -> list[tuple[Segment, int]]:
        """Take up to `limit` segments: one from each known NIC in turn, then strangers'."""
        batch: list[tuple[Segment, int]] = []
        while self._known_nics and len(batch) < limit:
            source = next(iter(self._known_nics))
            queue = self._known_nics.pop(source)
            batch.append(queue.popleft())
            if queue:
                self._known_nics[source] = queue  # now the last in turn
        while self._strangers and len(batch) < limit:
            batch.append(self._strangers.popleft())
        return batch

    def __bool__(self) -> bool:
        return bool(self._known_nics or self._strangers)
