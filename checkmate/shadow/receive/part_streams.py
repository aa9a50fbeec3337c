"""The receiving end of a stream of parts: each iteration has a header, the part, and a MAC of both."""

from __future__ import annotations

import enum
import hmac
import socket
import time
from typing import ClassVar, Final

from checkmate.keys.macs import MAC_BYTES, PartMac, PartMacs
from checkmate.shadow.receive.hold_plans import StreamPlan, TaggedStreamPlan, start_of
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.wire import copies
from checkmate.wire.copies import PartHeader
from checkmate.wire.schedule import StreamLayout

_DISCARDED_AT_ONCE: Final = 1 << 17


class _Phase(enum.Enum):
    """The message's piece that comes next."""

    HEADER = enum.auto()
    PART = enum.auto()
    DISCARDED_PART = enum.auto()
    MAC = enum.auto()


class PartInlet(Inlet):
    """The receiving end of a stream of parts.

    An iteration counts as received once its MAC is right. A rank that has left out iterations goes on to
    send; what comes then is read and discarded, on the same connection, until the hold joins again.
    """

    closed_words: ClassVar = "the rank closed the connection"

    def __init__(
        self, plan: StreamPlan, layout: StreamLayout, sets: BucketSets, *, first: int, joined: int
    ) -> None:
        super().__init__(plan, layout, sets, first=first, joined=joined)
        self._phase = _Phase.HEADER
        self._header_bytes = bytearray(copies.HEADER_BYTES)
        self._mac_bytes = bytearray(MAC_BYTES)
        self._header = PartHeader(-1, 0)
        self._is_wanted = False  # the part that comes
        self._read = 0  # bytes of it
        self._due: tuple[int, float] | None = None  # the last part: its iteration, and since when it waits
        self._is_last = False  # of the hold's streams, in an iteration that has ended
        self._waits = False  # whether that has not come whole
        self._scratch: memoryview | None = None
        self._macs: PartMacs | None = None
        self._mac: PartMac | None = None

    def accept(self, sock: socket.socket, macs: PartMacs) -> bool:
        """Take over a socket, on which the present iteration comes from its beginning.

        Return false if the inlet is closed.
        """
        with self._lock:
            self._rewind()
            self._phase, self._macs, self._is_wanted = _Phase.HEADER, macs, False
            self._waits = False
        return super().attach(sock)

    def rejoin(self, joined: int) -> bool:
        """Go on with iteration `joined` on the same connection. Return false if there is none."""
        with self._lock:
            if not self.connected:
                return False
            if self._phase is _Phase.PART:
                self._phase, self._room = _Phase.DISCARDED_PART, None
            self._is_wanted = self._waits = False
            self.iteration, self.lost, self.received_bytes = joined, "", 0
            self.position = start_of(self.layout, self.first, joined)
            self._piece, self._began = 0, None
            self.pulls.clear()
            return True

    def _next_room(self) -> memoryview | None:
        match self._phase:
            case _Phase.HEADER:
                self._room = memoryview(self._header_bytes)
            case _Phase.MAC:
                self._room = memoryview(self._mac_bytes)
            case _Phase.DISCARDED_PART:
                if self._scratch is None:
                    self._scratch = memoryview(bytearray(_DISCARDED_AT_ONCE))
                self._room = self._scratch[: self._header.nbytes - self._read]
            case _Phase.PART:
                return super()._next_room()
        return self._room

    def _note(self, room: memoryview, count: int) -> None:
        if self._phase in (_Phase.HEADER, _Phase.MAC):
            return
        assert self._mac is not None
        self._mac.update(room[:count])
        self._read += count
        if not self._is_wanted:
            return
        if self._began is None:
            self._began = time.monotonic()
        self.received_bytes += count
        if self._read < self._header.nbytes:  # the last bytes count once the MAC is right
            self.position += count

    def _filled(self) -> str:
        phase, self._room = self._phase, None
        match phase:
            case _Phase.HEADER:
                return self._begin()
            case _Phase.MAC:
                return self._end()
            case _Phase.PART:
                self._piece += 1
        if self._read == self._header.nbytes:
            self._phase = _Phase.MAC
        return ""

    def _begin(self) -> str:
        """Go on after a header. Return why the stream ends, or ""."""
        assert self._macs is not None
        self._header = header = PartHeader.unpack(self._header_bytes)
        if header.nbytes not in (0, self.layout.nbytes):
            return (
                f"the rank sends iteration {header.iteration} with {header.nbytes} bytes, and iteration "
                f"{self.iteration} with {self.layout.nbytes} is expected"
            )
        self._mac = self._macs.begin(self._header_bytes)
        self._read = 0
        self._is_wanted = header.nbytes > 0 and header.iteration == self.iteration and not self.lost
        if self._is_wanted:
            self._phase = _Phase.PART
            self._note_due(header.iteration, time.monotonic() - header.waited)
        else:
            self._phase = _Phase.DISCARDED_PART if header.nbytes else _Phase.MAC
        return ""

    def _end(self) -> str:
        """Go on after a MAC. Return why the stream ends, or ""."""
        assert self._mac is not None
        header, self._phase = self._header, _Phase.HEADER
        if not hmac.compare_digest(self._mac.end(), self._mac_bytes):
            self._rewind()
            self._waits = False
            self.lost = (
                f"the part of iteration {header.iteration} does not fit its authentication code: something "
                "on the way from the rank, or memory, has changed it; look for faults of memory and network "
                "on both hosts, and whether someone sends in the rank's place"
            )
            return self.lost
        if self._is_wanted:
            self._is_wanted = self._waits = False
            # First, because the last of the hold's streams to end looks at the positions of all.
            self.position = start_of(self.layout, self.first, self.iteration + 1)
            self._end_iteration()
        elif header.iteration >= self.iteration and not self.lost:
            self.lost = self._loss(header)
        return ""

    def take_news(self) -> bool:
        """Return whether the hold has an iteration of all streams: it may have a thousand of them."""
        is_last, self._is_last = self._is_last, False
        return is_last

    def _end_iteration(self) -> None:
        self._is_last |= self._sets.note_end(self.iteration)
        super()._end_iteration()

    def _note_due(self, iteration: int, since: float) -> None:
        if self._due is not None and iteration > self._due[0]:
            self.period = max(0.0, since - self._due[1]) / (iteration - self._due[0])
        self._due, self._waits = (iteration, since), True

    @property
    def waited(self) -> float:
        """Seconds for which the rank has had the part that comes next; 0 if it has none."""
        due = self._due
        return time.monotonic() - due[1] if self._waits and due is not None else 0.0

    def _loss(self, header: PartHeader) -> str:
        if not header.nbytes:
            newest = header.iteration
            self.left_out = range(self.iteration, newest + 1)
            return f"the rank has left out iterations up to {newest}, because this node took too little"
        return f"the rank sends iteration {header.iteration}, and no longer has iteration {self.iteration}"


def new_inlet(plan: StreamPlan, layout: StreamLayout, sets: BucketSets, *, first: int, joined: int) -> Inlet:
    """Return the receiving end of a stream, of copies by a switch or by hosts."""
    kind = Inlet if isinstance(plan, TaggedStreamPlan) else PartInlet
    return kind(plan, layout, sets, first=first, joined=joined)
