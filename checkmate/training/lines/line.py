"""A trainer's line to one shadow node: records go out in the background, whatever becomes of the node.

One thread a node. Records wait in a bounded queue until they are answered, so that a connection that broke
costs none; if a node is away for long, the oldest are dropped. If a node wants nothing, few answers are asked
for. The node's socket holds what it has not read (`rpc.frames`), also once this process has died.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from checkmate.job.schema import ShadowNode
from checkmate.nodes.stubs import reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.frames import ANSWER, GREETING, FrameError, Unpacker, pack
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.wire import tcp

_log: Final = logging.getLogger("checkmate")

QUEUED_BYTES: Final = 64 << 20
"""Of records that a node has not answered."""
BEGIN_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 5.0
ANSWERED_EVERY: Final = 4
"""Every so many records, one asks for an answer;"""
ATTENTIVE: Final = 16
"""and each of the first so many after a connect, or after a node has asked for something."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 1.0
_AT_ONCE: Final = 1 << 20  # bytes that are taken from the queue before they are written
_VANISHED_SECONDS: Final = 15
_WAIT: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Queued(NamedTuple):
    iteration: int
    data: bytes


class Line:
    """Talks to one shadow node until `close`. `begin`: what the group's first rank says at each connect."""

    def __init__(
        self,
        node: ShadowNode,
        stub: ShadowStub,
        begin: Callable[[], pb.BeginRequest] | None,
        on_reply: Callable[[int, pb.RecordReply], None],
        on_begun: Callable[[pb.BeginRequest], None] = lambda request: None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`on_begun` is told what the node has accepted, before it is sent records."""
        self.node = node
        self.stub = stub
        self.begun = threading.Event()
        """Set once the node has accepted `begin`, or need not."""
        self._begin = begin
        self._on_reply = on_reply
        self._on_begun = on_begun
        self._tls = tls
        self._parts: deque[_Queued] = deque()
        self._nbytes = 0  # of them
        self._sent = 0  # of them, on the present connection
        self._taken = self._written = -1  # on the present connection: from the queue, and by the kernel
        self._calm = 0  # records since the node wanted something
        self._finishing = self._flushed = False
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._dropped = False
        self._complaint = ""
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"shadow node {node.id}", daemon=True)

    def start(self) -> None:
        """Connect, and stay connected."""
        self._thread.start()

    def send(self, iteration: int, data: bytes) -> None:
        """Queue an iteration's part, serialized; never waits."""
        if self._closing.is_set():
            return
        with self._changed:
            self._parts.append(_Queued(iteration, data))
            self._nbytes += len(data)
            while self._nbytes > QUEUED_BYTES and len(self._parts) > 1:
                self._drop_oldest()
        os.eventfd_write(self._wake, 1)

    def departed(self, iteration: int) -> bool:
        """Whether an iteration's record is in the kernel's hands; true also if the node is away."""
        return self._written >= iteration or not self.connected

    def unanswered(self) -> int:
        """Return how many records the node has not answered."""
        return len(self._parts)

    @property
    def connected(self) -> bool:
        """Whether the node answers."""
        return self.begun.is_set() and not self._complaint

    def finish(self, timeout: float) -> bool:
        """Nothing follows: wait until the node has every record, as far as `timeout` seconds allow."""
        self._finishing = True
        os.eventfd_write(self._wake, 1)
        with self._changed:
            return self._changed.wait_for(lambda: not self._parts, timeout)

    def end(self) -> None:
        """Have the thread end, without waiting for it."""
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """End the thread, if it was started; what is still queued is lost."""
        self.end()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            try:
                if self._begin is not None:
                    self._say_begin(self._begin)
                self.begun.set()
                with closing(self._connect()) as sock:
                    why = self._exchange(sock)
            except grpc.RpcError as error:
                why = reason(error)
            except grpc.FutureCancelledError:
                return  # closed
            except (OSError, FrameError, DecodeError) as error:
                why = str(error)
            if not why:
                return
            pause = min(2 * pause, _LONGEST_PAUSE) if self._complaint else _FIRST_PAUSE
            self._lost(why)
            self._closing.wait(pause)

    def _say_begin(self, begin: Callable[[], pb.BeginRequest]) -> None:
        request = begin()
        self._call = self.stub.Begin.future(request, timeout=BEGIN_SECONDS)
        if self._closing.is_set():
            self._call.cancel()
        for warning in self._call.result().warnings:
            _log.warning("shadow node %d: %s", self.node.id, warning)
        self._on_begun(request)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self.node.records_at, CONNECT_SECONDS)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tcp.notice_vanished(sock, _VANISHED_SECONDS)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self.node.records_at[0])
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock

    def _exchange(self, sock: socket.socket) -> str:
        """Send records, take replies. Return why it ended; empty: nothing follows, and the node has all."""
        outgoing, unpacker = bytearray(GREETING), Unpacker()
        with self._changed:
            self._sent = self._calm = 0
            self._taken = self._written = -1
            self._flushed = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while True:
                for data in self._next(_AT_ONCE - len(outgoing)):
                    outgoing += data
                _write(sock, outgoing)
                if not outgoing:
                    self._written = self._taken
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
                selector.modify(sock, events)
                ready = {key.fd for key, _ in selector.select()}
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._closing.is_set() or (self._finishing and not self._parts):
                    return ""
                for frame in _read(sock, unpacker):
                    reply = pb.RecordReply.FromString(frame)
                    if reply.refused:
                        return reply.refused
                    self._answered(reply)

    def _next(self, room: int) -> Iterator[bytes]:
        """Frames to send now: first of the parts that an earlier connection has left unanswered."""
        with self._changed:
            while room > 0 and self._sent < len(self._parts):
                self._calm += 1
                asks = self._calm <= ATTENTIVE or self._calm % ANSWERED_EVERY == 0
                data = pack(self._parts[self._sent].data, ANSWER if asks else 0)
                self._taken = self._parts[self._sent].iteration
                self._sent += 1
                room -= len(data)
                yield data
            if self._finishing and not self._flushed and self._sent == len(self._parts):
                self._flushed = True
                yield pack(b"", ANSWER)

    def _answered(self, reply: pb.RecordReply) -> None:
        if self._complaint:
            _log.info("shadow node %d is back", self.node.id)
            self._complaint = ""
        with self._changed:
            while self._parts and self._parts[0].iteration <= reply.iteration:
                self._pop()
            if reply.wanted:
                self._calm = 0
            self._changed.notify_all()
        self._on_reply(self.node.id, reply)

    def _pop(self) -> None:
        self._nbytes -= len(self._parts.popleft().data)
        self._sent = max(self._sent - 1, 0)

    def _drop_oldest(self) -> None:
        self._pop()
        if not self._dropped:
            self._dropped = True
            _log.warning(
                "shadow node %d has left %d MiB of step records unanswered: the oldest are dropped",
                self.node.id,
                QUEUED_BYTES >> 20,
            )

    def _lost(self, why: str) -> None:
        if not self._complaint and not self._closing.is_set():
            _log.warning("shadow node %d (%s): %s; training goes on", self.node.id, self.node.mgmt, why)
        self._complaint = why


def _write(sock: socket.socket, outgoing: bytearray) -> None:
    """Send what can be sent now."""
    while outgoing:
        try:
            count = sock.send(outgoing)
        except _WAIT:
            return
        del outgoing[:count]


def _read(sock: socket.socket, unpacker: Unpacker) -> Iterator[bytes]:
    """Yield the messages that have come. `ConnectionError` once the node has ended the connection."""
    while True:
        try:
            data = sock.recv(1 << 16)
        except _WAIT:
            return
        if not data:
            raise ConnectionResetError("it ended the connection")
        for frame in unpacker.feed(data):
            yield frame.data
