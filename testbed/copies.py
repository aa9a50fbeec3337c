"""An emulated switch: ordinary TCP servers at the stubs' addresses.

They send each stream its "tagged" bytes from the hello's base on, and nothing after a gap: a TCP receiver
waits at a gap for ever.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.wire.tag import HELLO_LENGTH, Hello
from testbed.jobs import job_data
from testbed.ports import free_port


def local_job(**kwargs: Any) -> Job:
    """Return a job whose shadow nodes and stubs are all on this machine's loopback interface."""
    data = job_data(**kwargs)
    for node in data["shadow_nodes"]:
        number = node["id"]
        for key in ("mgmt", "records"):
            node[key] = f"127.0.3.{number + 1}:{free_port()}"
        for index, nic in enumerate(node["nics"]):
            nic["ip"] = f"127.0.{4 + index}.{number + 1}"
    for index, switch in enumerate(data["fabric"]["switches"]):
        switch["stub"]["ip"] = f"127.0.2.{index + 1}"
        switch["stub"]["port"] = free_port()
    return of_data(Job, data)


_HELLO_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.2

StreamKey = tuple[int, int, int]
"""Boundary, channel, shard."""


class Copies:
    """The stubs of a job's switches. Tagged bytes go to every connected holder."""

    def __init__(self, job: Job) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[StreamKey, str], CopiedStream] = {}
        self._nodes = {str(nic.ip): node.id for node in job.shadow_nodes for nic in node.nics}
        self.hellos: list[tuple[int, Hello]] = []
        self._greeting = 0  # connections whose hello is being read
        self.refusing = False
        self.resetting = False
        self._listeners = [
            socket.create_server((str(s.stub.ip), s.stub.port), backlog=64) for s in job.fabric.switches
        ]
        for listener in self._listeners:
            listener.setblocking(False)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def send_tagged(self, key: StreamKey, incarnation: int, position: int, data: bytes) -> None:
        """Send bytes of a stream, starting at `position`.

        Nodes count as connected once the kernel has acknowledged their hello. A switch has read it by then;
        here it is waited for.
        """
        deadline = time.monotonic() + _HELLO_SECONDS
        while self._is_greeted() and time.monotonic() < deadline:
            time.sleep(0.001)
        with self._lock:
            streams = [s for (k, _), s in self._streams.items() if k == key and s.incarnation == incarnation]
        for stream in streams:
            stream.send(position, data)

    def sends(self, key: StreamKey, ip: str, incarnation: int) -> bool:
        """Return whether a NIC gets the stream; a real stub acknowledges a hello only then."""
        with self._lock:
            stream = self._streams.get((key, ip))
            return stream is not None and stream.incarnation == incarnation

    def disconnect(self, node: int) -> None:
        """Break all of a node's connections."""
        with self._lock:
            for (key, ip), stream in list(self._streams.items()):
                if self._nodes[ip] == node:
                    stream.socket.close()
                    del self._streams[key, ip]

    def lose(self, node: int, count: int, key: StreamKey | None = None) -> None:
        """Drop `count` bytes of all of a node's streams, or of the stream `key`."""
        with self._lock:
            for (k, ip), stream in self._streams.items():
                if self._nodes[ip] == node and key in (None, k):
                    stream.lose += count

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        with self._lock:
            for stream in self._streams.values():
                stream.socket.close()

    def _is_greeted(self) -> bool:
        """Return whether a connection has come whose hello is not read yet."""
        with self._lock:
            try:
                return self._greeting > 0 or _has_come(self._listeners, 0)
            except (OSError, ValueError):
                return False  # closed

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                if not _has_come([listener], _POLL_SECONDS):
                    continue
                with self._lock:
                    connection, address = listener.accept()
                    self._greeting += 1
            except BlockingIOError:
                continue  # it has gone again
            except (OSError, ValueError):
                return  # closed
            try:
                self._greet(connection, address[0])
            finally:
                with self._lock:
                    self._greeting -= 1

    def _greet(self, connection: socket.socket, ip: str) -> None:
        """Read a hello, and copy to its sender from now on."""
        if self.refusing:
            connection.close()
            return
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        hello, _ = Hello.unpack(connection.recv(HELLO_LENGTH, socket.MSG_WAITALL))
        if self.resetting:  # it was acknowledged a moment ago
            self.hellos.append((self._nodes[ip], hello))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            return
        key = (hello.boundary, hello.channel, hello.shadow_id)
        with self._lock:
            self.hellos.append((self._nodes[ip], hello))
            old = self._streams.get((key, ip))
            self._streams[key, ip] = CopiedStream(connection, hello)
        if old is not None:
            old.socket.close()


def _has_come(listeners: Sequence[socket.socket], seconds: float) -> bool:
    """Return whether a connection has come within some seconds. Raise `ValueError` for a closed listener."""
    poll = select.poll()
    for listener in listeners:
        poll.register(listener, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


class CopiedStream:
    """One connection; `next` is the number (mod 2^32) of the byte that its receiver waits for."""

    def __init__(self, connection: socket.socket, hello: Hello) -> None:
        self.socket, self.incarnation = connection, hello.incarnation
        self.next = hello.base
        self.lose = 0

    def send(self, position: int, data: bytes) -> None:
        if self.lose:
            skipped = min(self.lose, len(data))
            self.lose -= skipped
            position, data = position + skipped, data[skipped:]
        behind = (self.next - position) % (1 << 32)
        if behind >= 1 << 31 or not data:
            return  # after a gap, TCP waits for ever
        rest = data[behind:]
        try:
            self.socket.sendall(rest)
        except OSError:
            return  # the node has ended
        self.next = (self.next + len(rest)) % (1 << 32)
