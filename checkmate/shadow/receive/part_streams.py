"""The node's end of streams of parts: a listener, and inlets that read iterations with headers.

Trainers connect. A connection proves that it has the job's `gradients.key`, names its stream, and is told the
iteration with which it goes on (`wire.copies`). From then on the node only reads.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final

from checkmate.keys.macs import GRADIENTS, ConnectionProof, ConnectionSide, new_nonce
from checkmate.output.log_lines import StrangerLog
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import locks
from checkmate.shadow.receive.hold_plans import StreamPlan, TaggedStreamPlan
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.shadow.receive.stream_threads import Reader
from checkmate.wire import copies, tcp
from checkmate.wire.copies import NodeAnswer, PartGreeting, PartsRefused
from checkmate.wire.schedule import StreamLayout

GREETING_SECONDS: Final = 2.0
"""Time in which a connection must have proved itself."""
MAX_GREETINGS: Final = 64
"""Connections that may be proving themselves at a time; more are closed at once."""
_WORKERS: Final = 8
_VANISHED_SECONDS: Final = 15


class PartInlet(Inlet):
    """The receiving end of a stream of parts: each iteration has a header."""

    closed_words: ClassVar = "the rank closed the connection"

    def __init__(
        self, plan: StreamPlan, layout: StreamLayout, sets: BucketSets, *, first: int, joined: int
    ) -> None:
        super().__init__(plan, layout, sets, first=first, joined=joined)
        self._header = bytearray(copies.HEADER_BYTES)
        self._in_header = True

    def attach(self, sock: socket.socket) -> bool:
        """Take over a socket, on which the present iteration comes from its beginning."""
        with self._lock:
            self._rewind()
            self._in_header = True
        return super().attach(sock)

    def _next_room(self) -> memoryview | None:
        if self._in_header:
            self._room = memoryview(self._header)
            return self._room
        return super()._next_room()

    def _note(self, count: int) -> None:
        if not self._in_header:
            super()._note(count)

    def _filled(self) -> str:
        if self._in_header:
            self._in_header, self._room = False, None
            iteration, nbytes = copies.unpack_header(self._header)
            fits = iteration == self.iteration and nbytes == self.layout.nbytes
            return "" if fits else self._misfit(iteration, nbytes)
        iteration = self.iteration
        why = super()._filled()
        self._in_header = self.iteration != iteration
        return why

    def _misfit(self, iteration: int, nbytes: int) -> str:
        if not nbytes:
            self.left_out = range(self.iteration, iteration + 1)
            return f"the rank has left out iterations up to {iteration}, because this node took too little"
        return (
            f"the rank sends iteration {iteration} with {nbytes} bytes, and iteration {self.iteration} with "
            f"{self.layout.nbytes} is expected"
        )


def new_inlet(plan: StreamPlan, layout: StreamLayout, sets: BucketSets, *, first: int, joined: int) -> Inlet:
    """Return the receiving end of a stream, of copies by a switch or by hosts."""
    kind = Inlet if isinstance(plan, TaggedStreamPlan) else PartInlet
    return kind(plan, layout, sets, first=first, joined=joined)


class PartListener:
    """The streams of copies by hosts, which come to one address and have one reader."""

    def __init__(
        self,
        job: str,
        listener: socket.socket,
        key: bytes,
        on_change: Callable[[], None],
        on_broken: Callable[[Inlet], None],
    ) -> None:
        """Take over a listening socket, and accept connections. `key`: the secret `gradients.key`."""
        self.addresses = [":".join(map(str, listener.getsockname()[:2]))]
        self.readers = [Reader("parts", on_change, on_broken)]
        self._job, self._listener, self._key, self._on_change = job, listener, key, on_change
        self._lock = locks.ordered_lock("parts")
        self._expected: dict[tuple[int, int, int], tuple[Inlet, bytes]] = {}
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="part greetings")
        self._room = threading.Semaphore(MAX_GREETINGS)
        self._strangers = StrangerLog()
        self._stopping = False
        self._thread = threading.Thread(target=self._accept, name="part connections", daemon=True)
        self._thread.start()

    def connect(self, inlet: Inlet, begin: pb.BeginRequest, *, again: bool = False) -> None:
        """Attach to an inlet the next connection of its stream in this start of training."""
        plan = inlet.plan
        with self._lock:
            self._expected[plan.group, plan.sender, plan.shard] = inlet, begin.start

    def stop(self) -> None:
        """Accept no more, and end the reader."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        self._listener.close()
        for reader in self.readers:
            reader.stop()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._stopping:
                    return
                time.sleep(0.1)  # no descriptor is free, for example
                continue
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            self._pool.submit(self._meet, sock, address[0])

    def _meet(self, sock: socket.socket, host: str) -> None:
        try:
            if not self._greet(sock):
                sock.close()
        except (OSError, PartsRefused) as error:
            sock.close()
            self._strangers.line(f"gradients from {host}: {error}")
        finally:
            self._room.release()

    def _greet(self, sock: socket.socket) -> bool:
        """Answer a connection, and attach it to its inlet. Return whether it was taken over."""
        deadline = time.monotonic() + GREETING_SECONDS
        data = tcp.receive_exactly(sock, copies.GREETING_BYTES, deadline)
        greeting = PartGreeting.unpack(data)
        nonce = new_nonce()
        sock.sendall(copies.pack_challenge(nonce))
        proof = ConnectionProof(self._key, data, greeting.nonce, nonce, GRADIENTS)
        if not proof.is_authentic(ConnectionSide.CONNECTS, tcp.receive_exactly(sock, 16, deadline)):
            raise PartsRefused("it has another gradients.key")
        inlet, why = self._find(greeting)
        mac = proof.mac(ConnectionSide.ACCEPTS)
        if inlet is None:
            sock.sendall(NodeAnswer(-1, why, mac).pack())
            return False
        try:
            tcp.notice_vanished(sock, _VANISHED_SECONDS)
            sock.sendall(NodeAnswer(inlet.iteration, "", mac).pack())
        except OSError:  # the rank has gone meanwhile, and comes again
            with self._lock:
                self._expected.setdefault(_key(greeting), (inlet, greeting.start))
            raise
        if not inlet.attach(sock):
            return False
        self.readers[0].add(inlet)
        self._on_change()
        return True

    def _find(self, greeting: PartGreeting) -> tuple[Inlet | None, str]:
        """Return the inlet that waits for a stream, or why there is none."""
        if greeting.job != copies.job_digest(self._job):
            return None, f"this node belongs to job {self._job}"
        with self._lock:
            inlet, start = self._expected.get(_key(greeting), (None, b""))
            if inlet is None or start != greeting.start or inlet.closed:
                return None, "this start of training has not begun here"
            if inlet.connected:
                return None, "the stream's earlier connection has not ended yet"
            if greeting.nbytes != inlet.layout.nbytes:
                return None, (
                    f"the rank's part has {greeting.nbytes} bytes, and this node expects "
                    f"{inlet.layout.nbytes}: trainers and shadow nodes must read the same job file"
                )
            del self._expected[_key(greeting)]
        return inlet, ""


def _key(greeting: PartGreeting) -> tuple[int, int, int]:
    return greeting.group, greeting.position, greeting.shard
