"""A rank's connection for step records to a shadow node, in its simplest form."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading

from checkmate.job.schema import Job
from checkmate.keys.contexts import client_context
from checkmate.keys.folder import RoleKeys
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.frames import ANSWER, GREETING, Unpacker, pack

WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class RecordLine:
    """Connection that sends parts and collects replies; `refusal` is the reason if the node ended it."""

    def __init__(self, job: Job, node: int, keys: RoleKeys | None = None) -> None:
        self.replies: list[pb.RecordReply] = []
        self.refusal = ""
        self.closed = threading.Event()
        self._replies_read = 0
        address = job.node(node).records_at
        self._socket = socket.create_connection(address, 10)
        if keys is not None:
            self._socket = client_context(keys).wrap_socket(self._socket, server_hostname=address[0])
        self._socket.setblocking(False)
        self._turn = threading.Lock()  # two threads cannot use one TLS connection at a time
        self._send_all(GREETING)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def send(self, part: pb.RecordPart | None, flags: int = ANSWER) -> None:
        """Send a part, or only the request for a reply."""
        with contextlib.suppress(ConnectionError):  # the node has ended, as in many tests
            self._send_all(pack(part.SerializeToString() if part is not None else b"", flags))

    def new_seed_requests(self) -> list[pb.SeedWanted]:
        """Return the seeds that replies since the last call have asked for."""
        replies = self.replies[self._replies_read :]
        self._replies_read += len(replies)
        return [request for reply in replies for request in reply.wanted]

    def answer(self, part: pb.RecordPart) -> pb.RecordReply:
        """Send a part, and return its reply."""
        count = len(self.replies)
        self.send(part)
        while len(self.replies) == count:
            assert not self.closed.wait(0.01) or len(self.replies) > count
        return self.replies[count]

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):  # the node has ended it
            # Not by SSLSocket's own method, after which the other thread would read what TLS has encrypted.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _send_all(self, data: bytes) -> None:
        while data:
            try:
                with self._turn:
                    data = data[self._socket.send(data) :]
            except WAIT:
                select.select([], [self._socket], [], 0.05)

    def _receive(self) -> bytes:
        """Return the next message; empty at the end."""
        while True:
            try:
                with self._turn:
                    return self._socket.recv(1 << 16)
            except WAIT:
                select.select([self._socket], [], [], 0.05)

    def _read(self) -> None:
        unpacker = Unpacker(greeted=True)
        with contextlib.suppress(OSError):  # broken: treated like its end
            while (data := self._receive()) != b"":
                for frame in unpacker.feed(data):
                    reply = pb.RecordReply.FromString(frame.data)
                    self.refusal = reply.refused
                    self.replies.append(reply)
        self.closed.set()
