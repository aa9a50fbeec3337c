"""The receiving end of one stream, which reads a non-blocking socket directly into the buckets.

A stream is paused if it reaches an iteration whose set of buckets is still in use. Its socket then buffers
the data. The stream continues when the set is released.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import socket
import ssl
import sys
import termios
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import ClassVar

import torch

from checkmate import state
from checkmate.shadow import locks
from checkmate.shadow.receive.hold_plans import SETS, StreamPlan, start_of, whole_through
from checkmate.wire.layout import Layout
from checkmate.wire.repair import within_iterations
from checkmate.wire.schedule import StreamLayout


class BucketSets:
    """Two sets of a shard's buckets, as flat tensors.

    `released` is the newest iteration whose gradients are no longer needed. `released + SETS` is the newest
    iteration that may be written. `streams`: the number of streams that write.
    """

    def __init__(self, layout: Layout, shard: int, released: int, streams: int = 1) -> None:
        self._streams = streams
        self._ends: Counter[int] = Counter()  # of streams, by iteration
        self._lock = locks.ordered_lock("sets")
        buckets = {i: bucket for i, bucket in enumerate(layout.buckets) if bucket.shard == shard}
        self.tensors: list[dict[int, torch.Tensor]] = [
            {i: torch.zeros(b.elements, dtype=getattr(torch, b.dtype)) for i, b in buckets.items()}
            for _ in range(SETS)
        ]
        self._bytes = [{i: state.bytes_of(t) for i, t in tensors.items()} for tensors in self.tensors]
        self.released = released

    def gradients(self, iteration: int) -> Mapping[int, torch.Tensor]:
        """Return an iteration's gradients, as flat tensors by index of bucket."""
        return self.tensors[iteration % SETS]

    def release(self, iteration: int) -> None:
        """Have the sets of iterations up to this one written again."""
        self.released = iteration
        with self._lock:
            self._ends = Counter({later: count for later, count in self._ends.items() if later > iteration})

    def note_end(self, iteration: int) -> bool:
        """Note that a stream has ended an iteration. Return whether all have."""
        with self._lock:
            self._ends[iteration] += 1
            return self._ends[iteration] >= self._streams

    def clear(self) -> None:
        """Discard the tensors, for good, and the views that would keep their memory."""
        self.tensors = [{} for _ in range(SETS)]
        self._bytes = [{} for _ in range(SETS)]

    def free_for(self, iteration: int) -> bool:
        """Return whether an iteration's bytes may be written."""
        return iteration <= self.released + SETS

    def room(self, iteration: int, bucket: int, start: int, stop: int) -> memoryview:
        """Return writable bytes [start, stop) of a bucket."""
        return self._bytes[iteration % SETS][bucket][start:stop]


_TURN_BYTES = 8 << 20  # read from one stream before the NIC's other streams have their turn


class ReadResult(enum.Enum):
    """Result of a turn of reading."""

    MORE = enum.auto()  # call again when the socket is readable
    PAUSED = enum.auto()  # no set of buckets is free
    ENDED = enum.auto()  # closed by us, or broken


class Inlet:
    """The receiving end of one stream. `position` is its next byte (64 bits); only the reader changes it."""

    closed_words: ClassVar = "the switch's side closed the connection"

    def __init__(
        self,
        plan: StreamPlan,
        layout: StreamLayout,
        sets: BucketSets,
        *,
        first: int,
        joined: int,
    ) -> None:
        self.plan, self.layout = plan, layout
        self.first = first
        self.position = start_of(layout, first, joined)
        self.received_bytes = 0
        self.paused = False
        self.broken: str | None = None
        self.left_out = range(0)
        """Iterations that the sender has said to leave out."""
        self.socket: socket.socket | None = None
        self._sets = sets
        self.iteration = joined  # of the next byte
        self._piece = 0
        self._room: memoryview | None = None
        self._began: float | None = None  # when the first byte of `iteration` came
        self.pulls: deque[tuple[int, float, float]] = deque(maxlen=SETS + 1)
        """The last iterations, each with the arrival times of its first and last byte."""
        self._lock = locks.ordered_lock("inlet")
        self.closed = False
        """Whether we have closed it, so that nothing more is written into the buckets."""

    lost: str = ""
    """Why the rest of the stream is of no use, if the sender itself has said so."""
    period: float = 0.0
    """Seconds between the last iterations, as far as the sender tells; 0 if it does not."""

    @property
    def waited(self) -> float:
        """Seconds for which the sender has had what comes next; 0 if it has nothing, or does not tell."""
        return 0.0

    @property
    def connected(self) -> bool:
        """Whether it is sent copies, as far as is known."""
        return self.socket is not None and self.broken is None and not self.closed

    @property
    def whole(self) -> int | None:
        """The last iteration received completely; `None` if the stream never has data."""
        return whole_through(self.layout, self.first, self.position)

    def attach(self, sock: socket.socket) -> bool:
        """Take over a socket connected at `position`. Return false if the inlet is closed."""
        sock.setblocking(False)
        with self._lock:
            if self.closed:
                return False
            self.socket, self.broken = sock, None
            return True

    def rejoin(self, joined: int) -> bool:
        """Go on with iteration `joined` on the same connection. Return false if that is impossible."""
        return False

    def close(self) -> None:
        """Stop writing into the buckets before this returns. The reader closes the socket."""
        with self._lock:
            self.closed = True
            if self.socket is not None:
                with contextlib.suppress(OSError):  # no longer connected
                    self.socket.shutdown(socket.SHUT_RDWR)

    def queued(self) -> int:
        """Return the number of bytes in the socket's buffer."""
        return waiting(self.socket) if self.connected else 0

    def received(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the stream, which are in the buckets still."""
        parts = []
        for index, within in within_iterations(start, stop, self.layout.nbytes):
            for piece in self.layout.pieces:
                size = self.layout.itemsizes[piece.bucket]
                begin = max(within.start, piece.offset)
                end = min(within.stop, piece.offset + len(piece.where) * size)
                if begin < end:
                    place = piece.where.start * size - piece.offset
                    parts.append(
                        self._sets.room(self.first + index, piece.bucket, place + begin, place + end)
                    )
        return b"".join(parts)

    def take(self) -> ReadResult:
        """Read available data, for one turn at most."""
        with self._lock:
            if self.closed or self.socket is None:
                return ReadResult.ENDED
            return self._take(self.socket)

    def _take(self, sock: socket.socket) -> ReadResult:
        total = 0
        decrypting = isinstance(sock, ssl.SSLSocket)
        while total < _TURN_BYTES or decrypted(sock):
            room = self._room or self._next_room()
            if room is None:
                return self._break(self.closed_words) if at_its_end(sock) else ReadResult.PAUSED
            try:
                count = sock.recv_into(room)
            except (BlockingIOError, ssl.SSLWantReadError):
                return ReadResult.MORE
            except OSError as error:
                return self._break(f"the connection broke: {error.strerror}")
            if not count:
                return self._break(self.closed_words)
            total += count
            self._note(room, count)
            if count == len(room):
                if why := self._filled():
                    return self._break(why)
            else:
                self._room = room[count:]
                if not decrypting:  # a read of TLS ends with a record
                    return ReadResult.MORE  # the socket is empty
        return ReadResult.MORE

    def _note(self, room: memoryview, count: int) -> None:
        """Note that bytes of gradients were read, to the beginning of this room."""
        if self._began is None:
            self._began = time.monotonic()
        self.position += count
        self.received_bytes += count

    def _break(self, reason: str) -> ReadResult:
        self.broken = reason
        return ReadResult.ENDED

    def _next_room(self) -> memoryview | None:
        """Return the rest of the piece at `position`, or `None` if its set is not free."""
        if not self.layout.nbytes or not self._sets.free_for(self.iteration):
            return None
        piece = self.layout.pieces[self._piece]
        size = self.layout.itemsizes[piece.bucket]
        start, stop = piece.where.start * size, piece.where.stop * size
        self._room = self._sets.room(self.iteration, piece.bucket, start, stop)
        return self._room

    def _filled(self) -> str:
        """Go on after a room that is full. Return why the stream ends, or ""."""
        self._room = None
        self._piece += 1
        if self._piece == len(self.layout.pieces):
            self._end_iteration()
        return ""

    def take_news(self) -> bool:
        """Return whether the end of its last iteration, or iterations, may complete one of the hold."""
        return True

    def _end_iteration(self) -> None:
        self._piece = 0
        self.pulls.append((self.iteration, self._began or 0.0, time.monotonic()))
        self._began = None
        self.iteration += 1

    def _rewind(self) -> None:
        """Expect the present iteration from its first byte on."""
        self.position = start_of(self.layout, self.first, self.iteration)
        self._piece, self._room, self._began = 0, None, None


def at_its_end(sock: socket.socket) -> bool:
    """Return whether a non-blocking socket is at its end or broken."""
    if decrypted(sock):
        return False
    try:
        return not socket.socket.recv(sock, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def decrypted(sock: socket.socket) -> int:
    """Return the number of bytes that TLS has decrypted, and that were not read yet."""
    return sock.pending() if isinstance(sock, ssl.SSLSocket) else 0


def waiting(sock: socket.socket | None) -> int:
    """Return the number of bytes in a socket's receive buffer (SIOCINQ); 0 if it is closed."""
    if sock is None or sock.fileno() < 0:
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, b"\0" * 4), sys.byteorder)
    except OSError:
        return 0
