"""A node's listener for streams of parts: connections prove who they are, and are attached to their inlets.

Trainers connect. A connection proves that it has the job's `gradients.key`, names its stream, and is told the
iteration with which it goes on (`wire.copies`). From then on the node only reads.

One thread takes all connections through that, without waiting for any: strangers can occupy neither threads
nor more than `MAX_GREETINGS` sockets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Generator
from threading import Thread
from typing import Final

from checkmate.base.wording import counted
from checkmate.job.schema import Job
from checkmate.keys.callers import CallerRefused
from checkmate.keys.macs import GRADIENTS, MAC_BYTES, ConnectionProof, ConnectionSide, PartMacs, new_nonce
from checkmate.output.log_lines import StrangerLog
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import locks
from checkmate.shadow.admission import CallerGate
from checkmate.shadow.receive.inlet import Inlet
from checkmate.shadow.receive.part_streams import PartInlet
from checkmate.shadow.receive.stream_threads import Reader
from checkmate.wire import copies, tcp
from checkmate.wire.copies import NodeAnswer, PartGreeting, PartsRefused

log = logging.getLogger("checkmate")

GREETING_SECONDS: Final = 5.0
"""Time in which a connection must have proved itself, and has read why it is refused."""
MAX_GREETINGS: Final = 256
"""Connections that may be proving themselves at a time. More of them displace the oldest of one host."""
BUDGET_BYTES: Final = 256 << 20
"""Bytes of the socket buffers of all streams of a node."""
LEAST_BUFFER, MOST_BUFFER = 64 << 10, 4 << 20
"""Bytes of one stream's socket buffer: any user may have the greater size."""
READERS: Final = 4
"""Threads that read streams, at most: one for each processor."""
_ACCEPTED_AT_ONCE: Final = 32
_AGAIN_SECONDS: Final = 0.1
_VANISHED_SECONDS: Final = 15
_SAME_FILE: Final = "trainers and shadow nodes must read the same job file"
_CLIENT_HELLO: Final = 0x16
"""First byte of TLS."""


Greeting = Generator[int, bytes, PartInlet]
"""As `PartListener` makes it."""


def buffer_of(streams: int) -> int:
    """Return the bytes of each stream's socket buffer, by the number of a node's streams."""
    return min(MOST_BUFFER, max(LEAST_BUFFER, BUDGET_BYTES // max(1, streams)))


_NOT_BEGUN: Final = "this start of training has not begun here"


class _NotBegun(PartsRefused):
    """A rank is early, as at each start. It tries again, and says so itself if that lasts."""


class PartListener:
    """The streams of copies by hosts, which come to one address."""

    def __init__(
        self,
        job: Job,
        listener: socket.socket,
        key: bytes,
        gate: CallerGate | None,
        on_change: Callable[[], None],
        on_broken: Callable[[Inlet], None],
    ) -> None:
        """Take over a listening socket, and accept connections.

        Args:
            job: The node's job.
            listener: The socket.
            key: The secret `gradients.key`.
            gate: TLS of the connections; `None` if they have none.
            on_change: Called after a connection or an iteration.
            on_broken: Called with an inlet whose connection has broken.
        """
        self.addresses = [":".join(map(str, listener.getsockname()[:2]))]
        count = min(READERS, len(os.sched_getaffinity(0)))
        self.readers = [Reader(f"parts {number}", on_change, on_broken) for number in range(count)]
        self._job, self._key, self._gate, self._on_change = job, key, gate, on_change
        self._job_digest = copies.job_digest(job.job)
        self._lock = locks.ordered_lock("parts")
        self._streams: dict[tuple[int, int, int], tuple[PartInlet, bytes]] = {}
        """The inlet of each stream in the present start of training, and that start."""
        self._attached = 0
        self._greetings = _Greetings(listener, gate, self._greet, self._begin_to_read)

    def connect(self, inlet: Inlet, begin: pb.BeginRequest, *, again: bool = False) -> None:
        """Attach to an inlet the next connection of its stream in this start of training."""
        assert isinstance(inlet, PartInlet)
        plan = inlet.plan
        with self._lock:
            self._streams[plan.group, plan.sender, plan.shard] = inlet, begin.start

    def follow(self, job: Job) -> None:
        """Take streams of a job file in which the ranks have changed."""
        with self._lock:
            self._job = job
            self._streams.clear()

    def stop(self) -> None:
        """Accept no more, and end the readers."""
        self._greetings.stop()
        for reader in self.readers:
            reader.stop()

    def received(self) -> list[tuple[str, int]]:
        """Return the bytes that have come to the address."""
        return [(self.addresses[0], sum(reader.bytes for reader in self.readers))]

    def _greet(self, sock: socket.socket) -> Greeting:
        """Take a connection through its greeting. Yields how many bytes it needs, and is sent them.

        Returns the inlet that has the connection.
        """
        prefix = yield copies.PREFIX_BYTES
        try:
            copies.check_prefix(prefix)
        except PartsRefused:
            if copies.is_of_checkmate(prefix):
                sock.send(copies.pack_challenge(new_nonce()))  # with our version
            raise
        data = prefix + (yield copies.GREETING_BYTES - len(prefix))
        greeting = PartGreeting.unpack(data)
        nonce = new_nonce()
        sock.send(copies.pack_challenge(nonce))
        proof = ConnectionProof(self._key, data, greeting.nonce, nonce, GRADIENTS)
        if not proof.is_authentic(ConnectionSide.CONNECTS, (yield MAC_BYTES)):
            text = "it has another gradients.key"
            sock.send(NodeAnswer(-1, text, bytes(MAC_BYTES)).pack())  # no MAC for a stranger
            raise PartsRefused(text)
        mac = proof.mac(ConnectionSide.ACCEPTS)
        if self._gate is not None and not isinstance(sock, ssl.SSLSocket):
            text = f"this node takes encrypted streams alone: {_SAME_FILE}"
            sock.send(NodeAnswer(-1, text, mac).pack())
            raise PartsRefused(text)
        inlet, why = self._find(greeting)
        if inlet is None:
            sock.send(NodeAnswer(-1, why, mac).pack())
            raise (_NotBegun if why == _NOT_BEGUN else PartsRefused)(f"{_label(greeting)}: {why}")
        tcp.notice_vanished(sock, _VANISHED_SECONDS)
        half = buffer_of(len(self._streams)) // 2  # Linux doubles it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, half)
        sock.send(NodeAnswer(inlet.iteration, "", mac).pack())
        if not inlet.accept(sock, PartMacs(proof)):
            raise PartsRefused(f"{_label(greeting)}: its stream was closed meanwhile")
        return inlet

    def _begin_to_read(self, inlet: PartInlet) -> None:
        self.readers[self._attached % len(self.readers)].add(inlet)
        self._attached += 1
        self._on_change()

    def _find(self, greeting: PartGreeting) -> tuple[PartInlet | None, str]:
        """Return the inlet that waits for a stream, or why there is none."""
        if greeting.job != self._job_digest:
            return None, f"this node belongs to job {self._job.job}: check the node's address in the job file"
        groups = self._job.dp_groups
        ranks = len(groups[greeting.group].ranks) if greeting.group < len(groups) else 0
        with self._lock:
            has_begun = any(start == greeting.start for _, start in self._streams.values())
        if has_begun and greeting.position >= ranks:
            return None, (
                f"this node's job file has {counted(len(groups), 'DP group')}, and {counted(ranks, 'rank')} "
                f"in group {greeting.group}: {_SAME_FILE}"
            )
        with self._lock:
            inlet, start = self._streams.get(_key(greeting), (None, b""))
        if inlet is None or start != greeting.start or inlet.closed:
            return None, _NOT_BEGUN
        if inlet.socket is not None:  # its reader has not dropped it yet, even if it is broken
            return None, (
                "the stream's earlier connection has not ended: another process may be the same rank, "
                "which must run once"
            )
        if greeting.nbytes != inlet.layout.nbytes:
            return None, (
                f"the rank's part has {greeting.nbytes} bytes, and this node expects "
                f"{inlet.layout.nbytes}: {_SAME_FILE}"
            )
        return inlet, ""


def _key(greeting: PartGreeting) -> tuple[int, int, int]:
    return greeting.group, greeting.position, greeting.shard


def _label(greeting: PartGreeting) -> str:
    return f"DP group {greeting.group}, shard {greeting.shard}, rank at position {greeting.position}"


class _Newcomer:
    """A connection that proves itself. `greeting` goes on with the bytes that it needs."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self.sock, self.host = sock, host
        self.deadline = time.monotonic() + GREETING_SECONDS
        self.greeting: Greeting | None = None
        self.need = 0
        self.data = b""
        self.leaving = False  # it is refused, and may read why


class _Greetings:
    """The thread that accepts connections, and takes them through their greetings."""

    def __init__(
        self,
        listener: socket.socket,
        gate: CallerGate | None,
        greet: Callable[[socket.socket], Greeting],
        on_end: Callable[[PartInlet], None],
    ) -> None:
        listener.setblocking(False)
        self._listener, self._gate, self._greet, self._on_end = listener, gate, greet, on_end
        self._strangers = StrangerLog()
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._newcomers: dict[int, _Newcomer] = {}
        self._stopping = False
        self._thread = Thread(target=self._run, name="part connections", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and close all its sockets."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for fd in list(self._newcomers):
            self._drop(fd)
        self._epoll.close()
        self._listener.close()

    def _run(self) -> None:
        while not self._stopping:
            ends = [newcomer.deadline for newcomer in self._newcomers.values()]
            timeout = max(0.0, min(ends) - time.monotonic()) if ends else None
            for fd, _ in self._epoll.poll(timeout):
                try:
                    if fd == self._listener.fileno():
                        self._accept()
                    elif (newcomer := self._newcomers.get(fd)) is not None:
                        self._go_on(fd, newcomer)
                except Exception:  # our own bug; a node without this thread would take no gradients
                    log.exception("taking a rank's connection")
                    self._forget(fd)
            now = time.monotonic()
            for fd, newcomer in list(self._newcomers.items()):
                if newcomer.deadline <= now:
                    self._drop(fd, "" if newcomer.leaving else "it says nothing")

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free, for example
                if not self._stopping:
                    time.sleep(_AGAIN_SECONDS)
                return
            sock.setblocking(False)
            if len(self._newcomers) >= MAX_GREETINGS:
                ((crowd, _),) = Counter(newcomer.host for newcomer in self._newcomers.values()).most_common(1)
                oldest = next(fd for fd, newcomer in self._newcomers.items() if newcomer.host == crowd)
                self._drop(oldest, f"{MAX_GREETINGS} connections have not greeted, most from there")
            self._newcomers[sock.fileno()] = _Newcomer(sock, str(address[0]))
            self._epoll.register(sock, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        if fd in self._newcomers:
            self._drop(fd)

    def _drop(self, fd: int, why: str = "") -> None:
        newcomer = self._newcomers.pop(fd)
        newcomer.sock.close()
        if why:
            self._strangers.line(f"gradients from {newcomer.host}: {why}")

    def _go_on(self, fd: int, newcomer: _Newcomer) -> None:
        """Read what has come, and go on with the greeting as far as that is enough for."""
        try:
            if newcomer.leaving:
                if not newcomer.sock.recv(1 << 16):
                    self._drop(fd)
            elif newcomer.greeting is not None or self._begin(newcomer):
                self._read(newcomer)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except StopIteration as end:
            self._epoll.unregister(fd)  # before its reader, which may close the socket, knows of it
            del self._newcomers[fd]
            self._on_end(end.value)
        except (PartsRefused, CallerRefused) as error:
            if not isinstance(error, _NotBegun):
                self._strangers.line(f"gradients from {newcomer.host}: {error}")
            newcomer.leaving = True  # closing with unread bytes would discard the reason
            with contextlib.suppress(OSError):
                socket.socket.shutdown(newcomer.sock, socket.SHUT_WR)
        except OSError as error:
            self._drop(fd, str(error))

    def _begin(self, newcomer: _Newcomer) -> bool:
        """Begin a greeting, after TLS's handshake if there is one. Return whether it has begun."""
        if self._gate is not None:
            is_new = not isinstance(newcomer.sock, ssl.SSLSocket)
            if is_new and newcomer.sock.recv(1, socket.MSG_PEEK) == bytes([_CLIENT_HELLO]):
                newcomer.sock = self._gate.wrap(newcomer.sock)
            if isinstance(newcomer.sock, ssl.SSLSocket):
                newcomer.sock.do_handshake()
                self._gate.check(newcomer.sock, newcomer.host)
        newcomer.greeting = self._greet(newcomer.sock)
        newcomer.need = next(newcomer.greeting)
        return True

    def _read(self, newcomer: _Newcomer) -> None:
        """Read until no more has come. Raise `StopIteration` at the end of the greeting."""
        assert newcomer.greeting is not None
        while True:
            data = newcomer.sock.recv(newcomer.need - len(newcomer.data))
            if not data:
                raise ConnectionResetError("it closed the connection")
            newcomer.data += data
            if len(newcomer.data) == newcomer.need:
                data, newcomer.data = newcomer.data, b""
                newcomer.need = newcomer.greeting.send(data)
