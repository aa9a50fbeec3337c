"""Reception of step records from trainers: one thread, one connection for each rank (`rpc.frames`).

Receive buffers are as large as those of streams, and outlive trainers. A node that was stopped therefore
reads everything that was sent to it meanwhile.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from google.protobuf.message import DecodeError

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.frames import GREETING, FrameError, RecordFrame, Unpacker, pack
from checkmate.shadow.logic.group import CallRefused
from checkmate.shadow.receive.inlet import waiting
from checkmate.state import StateError
from checkmate.wire import tcp

log = logging.getLogger("checkmate")

_READ_BYTES: Final = 1 << 18
_VANISHED_SECONDS: Final = 15
_AGAIN_SECONDS: Final = 0.1

Take = Callable[[pb.RecordPart, bool], pb.RecordReply | None]
"""Processes a part and returns the reply, if one is wanted. Raises `CallRefused` or `StateError`."""


class Inbox:
    """A server of step records between `start` and `stop`."""

    def __init__(self, listener: socket.socket, take: Take, tls: ssl.SSLContext | None = None) -> None:
        """Take over `listener`, which `stop` closes."""
        self._listener, self._take, self._tls = listener, take, tls
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._connections: dict[_Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)

    def start(self) -> None:
        """Start to accept records."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close all connections. Does nothing if called again."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        for connection in self._connections:
            connection.socket.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)

    def unread(self) -> int:
        """Return the number of bytes that wait to be read."""
        return sum(waiting(one.socket) for one in list(self._connections))

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Connection):
                    self._turn(key.data)

    def _accept(self) -> None:
        """Accept a connection. A failure does not affect other connections."""
        sock = None
        try:
            sock, address = self._listener.accept()
            sock = self._prepared(sock)
            connection = _Connection(sock, address[0])
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._connections[connection] = None
        except (OSError, ValueError) as error:  # closed already, or too many open files
            log.warning("cannot accept a connection for step records: %s", error)
            if sock is not None:
                sock.close()
            else:
                time.sleep(_AGAIN_SECONDS)

    def _prepared(self, sock: socket.socket) -> socket.socket:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.notice_vanished(sock, _VANISHED_SECONDS)
        if self._tls is None:
            return sock
        return self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _turn(self, connection: _Connection) -> None:
        """Read available frames, answer them, and write without blocking."""
        try:
            for frame in connection.read():
                self._answer(connection, frame)
            connection.write()
        except (OSError, FrameError, DecodeError) as error:
            self._end(connection, str(error) or type(error).__name__)
            return
        except Exception as error:  # our own bug: keep serving the others
            log.exception("taking step records")
            self._end(connection, repr(error))
            return
        if connection.over or (connection.refused and not connection.outgoing):
            self._end(connection, "")
            return
        events = selectors.EVENT_WRITE if connection.outgoing else 0
        if not connection.refused:
            events |= selectors.EVENT_READ
        self._selector.modify(connection.socket, events, connection)

    def _answer(self, connection: _Connection, frame: RecordFrame) -> None:
        if connection.refused:
            return
        reply: pb.RecordReply | None = pb.RecordReply(iteration=connection.newest)
        if frame.data:
            part = pb.RecordPart.FromString(frame.data)
            try:
                reply = self._take(part, frame.wants_answer)
            except (CallRefused, StateError) as error:
                reply = pb.RecordReply(iteration=connection.newest, refused=str(error))
                connection.refused = True
            else:
                connection.newest = max(connection.newest, part.iteration)
        if reply is not None and (frame.wants_answer or connection.refused):
            connection.outgoing += pack(reply.SerializeToString())

    def _end(self, connection: _Connection, why: str) -> None:
        if why:
            log.info("step records from %s: %s", connection.peer, why)
        del self._connections[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()


class _Connection:
    """One rank's connection. `newest` is the newest iteration of which it has brought a part."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.socket, self.peer = sock, peer
        self.outgoing = bytearray()
        self.over = False
        """Whether the trainer has closed it."""
        self.refused = False
        """Whether to close it once the reply is sent."""
        self.newest = -1
        self._unpacker = Unpacker(GREETING)

    def read(self) -> Iterator[RecordFrame]:
        """Yield all available frames; then raise `OSError` if the connection is broken."""
        while not (self.over or self.refused):
            try:
                data = self.socket.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            yield from self._unpacker.feed(data)
            self.over = not data

    def write(self) -> None:
        """Send as much as possible without blocking."""
        while self.outgoing:
            try:
                count = self.socket.send(self.outgoing)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            del self.outgoing[:count]
