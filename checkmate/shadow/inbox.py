"""Reception of step records from trainers: one connection for each rank, with a thread (`rpc.frames`).

Receive buffers are as large as those of streams, and outlive trainers. A node that was stopped therefore
reads everything that was sent to it meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.frames import FrameError, OtherProtocol, Unpacker, pack
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
        self._stopping = threading.Event()
        self._served: dict[socket.socket, threading.Thread] = {}
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
        for sock, thread in list(self._served.items()):
            with contextlib.suppress(OSError):  # broken or closed
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # without TLS's part, which its thread uses
            thread.join()
        self._listener.close()

    def unread(self) -> int:
        """Return the number of bytes that wait to be read."""
        return sum(waiting(sock) for sock in list(self._served))

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
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:  # closed already, or too many open files
            if sock is not None:
                sock.close()
            elif self._stopping.wait(_AGAIN_SECONDS):
                return
            log.warning("cannot accept a connection for step records: %s", error)
            return
        name = f"records of {address[0]}"
        self._served[sock] = threading.Thread(
            target=self._serve, args=(sock, address[0]), name=name, daemon=True
        )
        self._served[sock].start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        """Answer one rank until the connection ends."""
        why = ""
        try:
            self._answer_all(sock)
        except OtherProtocol as error:
            why = str(error)
            with contextlib.suppress(OSError):  # the trainer has left
                sock.sendall(pack(pb.RecordReply(iteration=-1, refused=why).SerializeToString()))
        except (OSError, FrameError, DecodeError) as error:
            why = str(error) or type(error).__name__
        except Exception as error:  # our own bug
            log.exception("taking step records")
            why = repr(error)
        if why and not self._stopping.is_set():
            log.info("step records from %s: %s", peer, why)
        del self._served[sock]
        sock.close()

    def _answer_all(self, sock: socket.socket) -> None:
        """Take parts until the trainer closes the connection, or one is refused.

        Nothing is sent while data waits to be read, because the trainer may have ended.
        """
        unpacker, replies, newest = Unpacker(greeted=False), bytearray(), -1
        while not self._stopping.is_set() and (data := sock.recv(_READ_BYTES)):
            for frame in unpacker.feed(data):
                reply: pb.RecordReply | None = pb.RecordReply(iteration=newest)
                if frame.data:
                    part = pb.RecordPart.FromString(frame.data)
                    try:
                        reply = self._take(part, frame.wants_answer)
                    except (CallRefused, StateError) as error:
                        refusal = pb.RecordReply(iteration=newest, refused=str(error))
                        sock.sendall(replies + pack(refusal.SerializeToString()))
                        return
                    newest = max(newest, part.iteration)
                if reply is not None and frame.wants_answer:
                    replies += pack(reply.SerializeToString())
            if replies and not waiting(sock):
                sock.sendall(replies)
                replies.clear()
