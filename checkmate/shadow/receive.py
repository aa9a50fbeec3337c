"""Reads streams straight into their buckets: one thread a NIC, non-blocking sockets, no copy between.

Iteration t goes into set t % 2 of a hold's two sets of buckets. A stream that reaches an iteration whose set
is still in use is paused, and its socket's buffer holds what comes; it goes on when the set is released.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import select
import socket
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from checkmate import state
from checkmate.layout import Layout
from checkmate.schedule import StreamLayout
from checkmate.shadow.streams import StreamPlan, start_of, whole_through

SETS = 2
_CLOSED = "the switch's side closed the connection"
_TURN_BYTES = 8 << 20  # of one stream, before the others of its NIC have their turn


class BucketSets:
    """Two sets of a shard's buckets, flat, and the iteration through which they are free again.

    `released` is the newest iteration whose gradients are no longer needed; `released + SETS` is the newest
    that may be written.
    """

    def __init__(self, layout: Layout, shard: int, released: int) -> None:
        ours = {i: bucket for i, bucket in enumerate(layout.buckets) if bucket.shard == shard}
        self.tensors: list[dict[int, torch.Tensor]] = [
            {i: torch.zeros(b.elements, dtype=getattr(torch, b.dtype)) for i, b in ours.items()}
            for _ in range(SETS)
        ]
        self._bytes = [{i: state.bytes_of(t) for i, t in tensors.items()} for tensors in self.tensors]
        self.released = released

    def gradients(self, iteration: int) -> Mapping[int, torch.Tensor]:
        """Where an iteration's gradients are: bucket index to flat tensor."""
        return self.tensors[iteration % SETS]

    def free_for(self, iteration: int) -> bool:
        """Whether an iteration's bytes may be written."""
        return iteration <= self.released + SETS

    def room(self, iteration: int, bucket: int, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a bucket."""
        return self._bytes[iteration % SETS][bucket][start:stop]

    @property
    def nbytes(self) -> int:
        """Memory that both sets take."""
        return sum(len(view) for views in self._bytes for view in views.values())


class Took(enum.Enum):
    """How a turn of reading ended."""

    MORE = enum.auto()  # call again when the socket is readable
    PAUSED = enum.auto()  # no set of buckets is free
    ENDED = enum.auto()  # closed by us, or broken


class Inlet:
    """One stream's receiving end. Its reader alone moves `position`, the stream's next byte (64 bits)."""

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
        self.received = 0
        self.paused = False
        self.broken: str | None = None
        self.socket: socket.socket | None = None
        self._sets = sets
        self.iteration = joined  # of the next byte
        self._piece = 0
        self._room: memoryview | None = None
        self._stood = (-1, 0.0)
        self._began: float | None = None  # when the first byte of `iteration` came
        self.pulls: deque[tuple[int, float, float]] = deque(maxlen=SETS + 1)
        """Of the last iterations: which, and when its first and its last byte came."""
        self._lock = threading.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was closed by us: nothing is written into the buckets any more."""
        return self._closed

    @property
    def connected(self) -> bool:
        """Whether the switch sends it copies, as far as we know."""
        return self.socket is not None and self.broken is None and not self._closed

    @property
    def whole(self) -> int | None:
        """The last iteration that it has brought whole; `None`: it never brings anything."""
        return whole_through(self.layout, self.first, self.position)

    @property
    def receiving(self) -> int | None:
        """The newest iteration of which a byte has come."""
        if not self.layout.nbytes or not self.received:
            return None
        return self.first + (self.position - 1) // self.layout.nbytes

    def stands_below(self, end: int, now: float) -> float:
        """For how many seconds it has stood where it is, below `end`; our own pauses don't count."""
        if self.paused or self.position >= end:
            self._stood = (-1, now)
        elif self._stood[0] != self.position:
            self._stood = (self.position, now)
        return now - self._stood[1]

    def attach(self, sock: socket.socket) -> bool:
        """Take a socket connected at `position`; False where it was closed meanwhile."""
        sock.setblocking(False)
        with self._lock:
            if self._closed:
                return False
            self.socket, self.broken = sock, None
            return True

    def close(self) -> None:
        """Nothing is written into the buckets once this returns; the reader closes the socket."""
        with self._lock:
            self._closed = True
            if self.socket is not None:
                with contextlib.suppress(OSError):  # not connected any more
                    self.socket.shutdown(socket.SHUT_RDWR)

    def queued(self) -> int:
        """Bytes that wait in the socket's buffer."""
        return waiting(self.socket) if self.connected else 0

    def take(self) -> Took:
        """Read what is there, a turn's worth at most."""
        with self._lock:
            if self._closed or self.socket is None:
                return Took.ENDED
            return self._take(self.socket)

    def _take(self, sock: socket.socket) -> Took:
        taken = 0
        while taken < _TURN_BYTES:
            room = self._room or self._next_room()
            if room is None:
                return self._break(_CLOSED) if at_its_end(sock) else Took.PAUSED
            try:
                count = sock.recv_into(room)
            except BlockingIOError:
                return Took.MORE
            except OSError as error:
                return self._break(f"the connection broke: {error.strerror}")
            if not count:
                return self._break(_CLOSED)
            if self._began is None:
                self._began = time.monotonic()
            taken += count
            self.position += count
            self.received += count
            if count == len(room):
                self._filled()
            else:
                self._room = room[count:]
                return Took.MORE  # it had no more
        return Took.MORE

    def _break(self, reason: str) -> Took:
        self.broken = reason
        return Took.ENDED

    def _next_room(self) -> memoryview | None:
        """What is left of the piece at `position`; `None` where its set isn't free."""
        if not self.layout.nbytes or not self._sets.free_for(self.iteration):
            return None
        piece = self.layout.pieces[self._piece]
        size = self.layout.itemsizes[piece.bucket]
        start, stop = piece.where.start * size, piece.where.stop * size
        self._room = self._sets.room(self.iteration, piece.bucket, start, stop)
        return self._room

    def _filled(self) -> None:
        self._room = None
        self._piece += 1
        if self._piece == len(self.layout.pieces):
            self._piece = 0
            self.pulls.append((self.iteration, self._began or 0.0, time.monotonic()))
            self._began = None
            self.iteration += 1


def at_its_end(sock: socket.socket) -> bool:
    """Whether a non-blocking socket has no more to give, and never will."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def waiting(sock: socket.socket | None) -> int:
    """Bytes in a socket's receive buffer (SIOCINQ); 0 where it is closed."""
    if sock is None or sock.fileno() < 0:
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, b"\0" * 4), sys.byteorder)
    except OSError:
        return 0


class Reader:
    """A thread that reads the streams of one NIC.

    `on_iteration` is called when a stream has brought an iteration's last byte, `on_broken` when its
    connection broke; both from that thread, which holds no lock then.
    """

    def __init__(
        self, name: str, on_iteration: Callable[[], None], on_broken: Callable[[Inlet], None]
    ) -> None:
        self.bytes = 0
        self._on_iteration = on_iteration
        self._on_broken = on_broken
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._new: list[Inlet] = []
        self._inlets: dict[int, Inlet] = {}
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, inlet: Inlet) -> None:
        """Read this stream from now on; it has its socket."""
        with self._lock:
            self._new.append(inlet)
        self.wake()

    def wake(self) -> None:
        """A set of buckets was released, or a stream closed: look at all of them."""
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End, and close all sockets."""
        self._stopping = True
        self.wake()
        self._thread.join()
        for inlet in list(self._inlets.values()):
            self._drop(inlet)
        with self._lock:
            self._ended = True
            self._epoll.close()
            os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            for fd, _ in self._epoll.poll():
                if fd == self._wake:
                    self._look_again()
                elif inlet := self._inlets.get(fd):
                    self._turn(inlet)

    def _look_again(self) -> None:
        os.eventfd_read(self._wake)
        with self._lock:
            new, self._new = self._new, []
        for inlet in new:
            if inlet.socket is not None:
                self._inlets[inlet.socket.fileno()] = inlet
                self._epoll.register(inlet.socket, select.EPOLLIN)
        for inlet in list(self._inlets.values()):
            if inlet.paused or inlet.closed:
                self._turn(inlet)

    def _turn(self, inlet: Inlet) -> None:
        received, iteration = inlet.received, inlet.iteration
        took = inlet.take()
        self.bytes += inlet.received - received
        if inlet.iteration != iteration:
            self._on_iteration()
        match took:
            case Took.ENDED:
                self._drop(inlet)
                if not inlet.closed:
                    self._on_broken(inlet)
            case Took.PAUSED:
                self._pause(inlet, True)
            case Took.MORE:
                self._pause(inlet, False)

    def _pause(self, inlet: Inlet, paused: bool) -> None:
        """Edge-triggered while it is paused: a broken connection would wake us over and over."""
        if inlet.paused == paused or inlet.socket is None:
            return
        self._epoll.modify(inlet.socket, select.EPOLLET | select.EPOLLRDHUP if paused else select.EPOLLIN)
        inlet.paused = paused

    def _drop(self, inlet: Inlet) -> None:
        sock = inlet.socket
        if sock is None:
            return
        self._inlets.pop(sock.fileno(), None)
        with contextlib.suppress(OSError):  # a socket that was never registered
            self._epoll.unregister(sock)
        sock.close()
        inlet.socket, inlet.paused = None, False
