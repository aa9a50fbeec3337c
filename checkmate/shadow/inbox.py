"""Reception of step records from trainers: one connection for each rank, with a thread (`rpc.frames`).

Receive buffers are as large as those of streams, and outlive trainers. A node that was stopped therefore
reads everything that was sent to it meanwhile.

A connection has a few seconds for its TLS handshake and greeting. The number of connections is bounded: those
that have not greeted yet, and those that have, so that strangers cannot displace trainers. A trainer whose
connection was closed connects again, and sends again what was not answered.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from checkmate.base.wording import counted
from checkmate.keys.callers import CallerRefused
from checkmate.output.log_lines import StrangerLog
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.frames import GREETING, FrameError, OtherProtocol, Unpacker, pack
from checkmate.shadow.admission import CallerGate
from checkmate.shadow.logic.group import CallRefused
from checkmate.shadow.receive.inlet import waiting
from checkmate.state import StateError
from checkmate.wire import tcp

log = logging.getLogger("checkmate")

GREETING_SECONDS: Final = 5.0
"""Limit of the time from a TLS handshake to the greeting of a connection."""
FRAME_SECONDS: Final = 60.0
"""Limit of the time from the first byte of a frame to its last, without waits for room."""
HELD_BYTES: Final = 1 << 30
"""Bytes of all frames that are not complete. Above that, only the oldest is read on."""
NEWCOMERS: Final = 64
"""Connections that have not greeted yet."""
CONNECTIONS: Final = 256
"""Connections that have greeted, unless specified otherwise."""
_LINGER_SECONDS: Final = 1.0
_READ_BYTES: Final = 1 << 18
_VANISHED_SECONDS: Final = 15
_AGAIN_SECONDS: Final = 0.1

Take = Callable[[pb.RecordPart, bool, str], pb.RecordReply | None]
"""Processes a part from an address, and returns the reply, if one is wanted.

Raises `CallRefused` or `StateError`.
"""


@dataclass(eq=False)
class _Connection:
    """An accepted connection. `heard_at`: when something came last."""

    sock: socket.socket
    host: str
    admitted: bool
    """Whether its records count as unread; with TLS, once its caller is known."""
    greeted: bool = False
    closing: bool = False
    heard_at: float = field(default_factory=time.monotonic)

    def hang_up(self) -> None:
        """End it; its thread notices."""
        self.closing = True
        with contextlib.suppress(OSError):  # broken or closed
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # without TLS's part, which its thread uses


class Inbox:
    """A server of step records between `start` and `stop`."""

    def __init__(
        self,
        listener: socket.socket,
        take: Take,
        gate: CallerGate | None = None,
        most: Callable[[], int] = lambda: CONNECTIONS,
    ) -> None:
        """Take over `listener`, which `stop` closes.

        Args:
            listener: A listening socket.
            take: Called with each part, whether a reply is wanted, and the trainer's address.
            gate: Admits connections; `None` to admit everybody, without TLS.
            most: Returns the number of connections that have greeted, above which the quietest is closed.
        """
        self._listener, self._take, self._gate, self._most = listener, take, gate, most
        self._stopping = threading.Event()
        self._served: dict[_Connection, threading.Thread] = {}
        self._frames = _OpenFrames()
        self._strangers = StrangerLog()
        self._thread = threading.Thread(target=self._accept_forever, name="records", daemon=True)

    def start(self) -> None:
        """Start to accept records."""
        self._thread.start()

    def stop(self) -> None:
        """End all threads and close all connections. Does nothing if called again."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        if self._thread.ident is not None:
            self._thread.join()
        for connection, thread in list(self._served.items()):
            connection.hang_up()
            thread.join()
        self._listener.close()

    def unread(self) -> int:
        """Return the number of bytes that wait to be read."""
        return sum(waiting(connection.sock) for connection in list(self._served) if connection.admitted)

    def trainers(self) -> int:
        """Return the number of connections that have greeted."""
        return sum(connection.greeted and not connection.closing for connection in list(self._served))

    def _accept_forever(self) -> None:
        while not self._stopping.is_set():
            self._accept()

    def _accept(self) -> None:
        """Accept a connection. A failure does not affect other connections."""
        sock = None
        try:
            sock, address = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tcp.notice_vanished(sock, _VANISHED_SECONDS)
            if self._gate is not None:
                sock = self._gate.wrap(sock)
        except (OSError, ValueError) as error:  # closed already, or too many open files
            if sock is not None:
                sock.close()
            elif self._stopping.wait(_AGAIN_SECONDS):
                return
            self._strangers.line(f"cannot accept a connection for step records: {error}")
            return
        if not self._make_room():
            sock.close()
            return
        connection = _Connection(sock, str(address[0]), admitted=self._gate is None)
        name = f"records of {connection.host}"
        self._served[connection] = threading.Thread(
            target=self._serve, args=(connection,), name=name, daemon=True
        )
        self._served[connection].start()

    def _make_room(self) -> bool:
        """Close what is over the limits. Return whether there is room for one more."""
        served = list(self._served)
        new = [connection for connection in served if not connection.greeted and not connection.closing]
        old = [connection for connection in served if connection.greeted and not connection.closing]
        if len(new) >= NEWCOMERS:  # the oldest of the host that has most of them
            ((host, _),) = Counter(connection.host for connection in new).most_common(1)
            next(connection for connection in new if connection.host == host).hang_up()
            self._strangers.line(
                f"step records: {counted(len(new), 'connection')} without a greeting, most from {host}"
            )
        if len(old) > self._most():
            quietest = min(old, key=lambda connection: connection.heard_at)
            quietest.hang_up()
            self._strangers.line(
                f"step records: {counted(len(old), 'connection')}; closed one from {quietest.host}"
            )
        return len(served) < 2 * (NEWCOMERS + self._most())  # threads that end count, too

    def _serve(self, connection: _Connection) -> None:
        """Answer one rank until the connection ends."""
        why = ""
        try:
            if self._gate is not None:
                self._gate.admit(connection.sock, connection.host)
                connection.admitted = True
            self._answer_all(connection)
        except (CallerRefused, OtherProtocol) as error:
            why = str(error)
            _refuse(connection.sock, why)
        except (OSError, FrameError, DecodeError) as error:
            why = str(error) or type(error).__name__
        except Exception as error:  # our own bug
            log.exception("taking step records")
            why = repr(error)
        if why and not self._stopping.is_set():
            self._strangers.line(f"step records from {connection.host}: {why}")
        self._frames.forget(connection)
        del self._served[connection]
        connection.sock.close()

    def _answer_all(self, connection: _Connection) -> None:
        """Take parts until the trainer closes the connection, or one is refused.

        Nothing is sent while data waits to be read, because the trainer may have ended.
        """
        sock, replies, newest = connection.sock, bytearray(), -1
        unpacker, missing = Unpacker(greeted=False), len(GREETING)
        deadline = time.monotonic() + GREETING_SECONDS
        sock.settimeout(GREETING_SECONDS)
        ends = deadline  # of a frame that has begun
        while not self._stopping.is_set() and (data := _receive(sock, connection.greeted)):
            begins = not (connection.greeted and unpacker.held)  # a frame, in these bytes
            for frame in unpacker.feed(data):
                begins = True
                reply: pb.RecordReply | None = pb.RecordReply(iteration=newest)
                if frame.data:
                    part = pb.RecordPart.FromString(frame.data)
                    try:
                        reply = self._take(part, frame.wants_answer, connection.host)
                    except (CallRefused, StateError) as error:
                        refusal = pb.RecordReply(iteration=newest, refused=str(error))
                        sock.sendall(replies + pack(refusal.SerializeToString()))
                        return
                    newest = max(newest, part.iteration)
                if reply is not None and frame.wants_answer:
                    replies += pack(reply.SerializeToString())
            connection.heard_at, missing = time.monotonic(), missing - len(data)
            connection.greeted = missing <= 0
            if begins:
                ends = connection.heard_at + FRAME_SECONDS
            ends += self._frames.wait_for_room(connection, unpacker.held, begins)
            until = deadline if not connection.greeted else ends if unpacker.held else None
            sock.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
            if replies and not waiting(sock):
                sock.sendall(replies)
                replies.clear()


class _OpenFrames:
    """The bytes of all connections' frames that are not complete."""

    def __init__(self) -> None:
        self._bytes: dict[_Connection, int] = {}  # in the order in which the frames have begun
        self._room = threading.Condition()

    def wait_for_room(self, connection: _Connection, nbytes: int, begins: bool) -> float:
        """Note what a connection holds, and wait until it may hold more. Return the seconds of waiting.

        `begins`: whether it is of another frame than at the last call.
        """
        start = time.monotonic()
        with self._room:
            if begins:
                self._forget(connection)
            if not nbytes:
                return 0.0
            self._bytes[connection] = nbytes
            while not (connection.closing or self._may_go_on(connection)):
                self._room.wait(1.0)
        return time.monotonic() - start

    def forget(self, connection: _Connection) -> None:
        """Take note that a connection holds nothing any more."""
        with self._room:
            self._forget(connection)

    def _may_go_on(self, connection: _Connection) -> bool:
        return sum(self._bytes.values()) <= HELD_BYTES or next(iter(self._bytes)) is connection

    def _forget(self, connection: _Connection) -> None:
        if self._bytes.pop(connection, None) is not None:
            self._room.notify_all()


def _receive(sock: socket.socket, greeted: bool) -> bytes:
    """Return what has come. Raise `FrameError` if a frame is late."""
    try:
        return sock.recv(_READ_BYTES)
    except TimeoutError:
        if not greeted:
            raise
        raise FrameError(f"a step record did not end within {FRAME_SECONDS:g} s") from None


def _refuse(sock: socket.socket, why: str) -> None:
    """Send the reason for a refusal, and wait a little for the trainer to read it and close."""
    with contextlib.suppress(OSError):  # the trainer has left
        sock.sendall(pack(pb.RecordReply(iteration=-1, refused=why).SerializeToString()))
        socket.socket.shutdown(sock, socket.SHUT_WR)
        deadline = time.monotonic() + _LINGER_SECONDS
        while (
            remaining := deadline - time.monotonic()
        ) > 0:  # closing with unread data would discard the reason
            sock.settimeout(remaining)
            if not sock.recv(_READ_BYTES):
                return
