"""Takes step records from trainers: one thread, a connection for each rank (`rpc.frames`).

Its sockets' receive buffers are as large as a stream's, and outlive trainers: what was sent to a node that
was stopped meanwhile is read once it goes on.
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
"""Takes a part, and gives the reply if one is wanted; `CallRefused` or `StateError`."""


class Inbox:
    """Serves at an address from `start` to `stop`."""

    def __init__(self, listener: socket.socket, take: Take, tls: ssl.SSLContext | None = None) -> None:
        """`listener` is taken over."""
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
        """Take records from now on."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, close all connections. Calling it again does nothing."""
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
        """Return how many bytes wait to be read."""
        return sum(waiting(one.socket) for one in list(self._connections))

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Connection):
                    self._turn(key.data)

    def _accept(self) -> None:
        """Take a connection; one that goes wrong changes nothing for the others."""
        sock = None
        try:
            sock, address = self._listener.accept()
            sock = self._prepared(sock)
            connection = _Connection(sock, address[0])
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._connections[connection] = None
        except (OSError, ValueError) as error:  # it has gone already, or we have too many files open
            log.warning("a connection for step records can't be accepted: %s", error)
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
        """Read what is there, answer, and write what can be written."""
        try:
            for frame in connection.read():
                self._answer(connection, frame)
            connection.write()
        except (OSError, FrameError, DecodeError) as error:
            self._end(connection, str(error) or type(error).__name__)
            return
        except Exception as error:  # our own fault: the others' records go on
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
    """One rank's. `newest`: the newest iteration of which a part has come on it."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.socket, self.peer = sock, peer
        self.outgoing = bytearray()
        self.over = False
        """Whether the trainer has ended it."""
        self.refused = False
        """Whether we end it, once the reply has left."""
        self.newest = -1
        self._unpacker = Unpacker(GREETING)

    def read(self) -> Iterator[RecordFrame]:
        """Yield all that is there, also what came before the connection broke: `OSError` after that."""
        while not (self.over or self.refused):
            try:
                data = self.socket.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            yield from self._unpacker.feed(data)
            self.over = not data

    def write(self) -> None:
        """Send what can be sent now."""
        while self.outgoing:
            try:
                count = self.socket.send(self.outgoing)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            del self.outgoing[:count]
