"""Measurement of this machine's bandwidth into buckets: a shadow node's readers and sockets, over loopback.

The result is a lower bound, because the sender uses some of the same machine's cores.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from checkmate.planner.profile import sender
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.shadow.receive.hold_plans import StreamPlan
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.shadow.receive.stream_threads import Reader
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.schedule import LAST, stream_layout
from checkmate.wire.tcp import SO_RCVBUFFORCE

NICS: Final = (1, 2)
"""Numbers of NICs of a shadow node; each has a thread."""
PARAMETERS: Final = ((3_300_000,),) * 8
"""105 MB of gradients in four buckets, larger than caches; two sets of them."""
_LOOPBACK: Final = "127.0.0.1"
_CONNECT_SECONDS: Final = 10.0
_TICK_SECONDS: Final = 0.1


def measure(nics: int, seconds: float) -> Generator[float, None, None]:
    """Yield the bytes per second so far, ten times a second. The last one is the result.

    On a machine that is too busy for a byte to come in time it goes on, for 10 s more at most.
    """
    with connections(nics) as socks:
        receiver = Receiver(socks)
        try:
            receiver.settle()
            start, before = time.monotonic(), receiver.received
            took, received = 0.0, before
            while took < seconds or (received == before and took < seconds + _CONNECT_SECONDS):
                time.sleep(_TICK_SECONDS)
                took, received = time.monotonic() - start, receiver.received
                yield (received - before) / took
        finally:
            receiver.close()


@contextmanager
def connections(count: int) -> Iterator[list[socket.socket]]:
    """Open connections on which another process sends continuously."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(count)]
        for server in servers:
            server.settimeout(_CONNECT_SECONDS)
            enlarge(server)
        ports = [str(server.getsockname()[1]) for server in servers]
        command = [sys.executable, "-I", str(Path(sender.__file__)), _LOOPBACK, *ports]
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        stack.callback(process.kill)
        yield [stack.enter_context(server.accept()[0]) for server in servers]


def enlarge(sock: socket.socket) -> bool:
    """Set a shadow node's receive buffer. Return whether its full size is permitted."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        return False
    return True


def may_force() -> bool:
    """Return whether this process may use a shadow node's receive buffers."""
    with socket.socket() as sock:
        return enlarge(sock)


class Receiver:
    """A shadow node's readers, one per connection. Complete iterations are released at once."""

    def __init__(self, socks: Sequence[socket.socket], sets: BucketSets | None = None) -> None:
        """Start the readers. `sets` are an earlier receiver's buckets, whose memory is mapped already."""
        channels = len(socks)
        parameters = [Parameter(f"p{i}", shape, "float32") for i, shape in enumerate(PARAMETERS)]
        layout = make_layout(parameters, 1)
        self.sets = sets or BucketSets(layout, 0, -1)
        self.sets.released = -1
        self._inlets = []
        for channel in range(channels):
            plan = StreamPlan(0, 0, 1, channel)
            stream = stream_layout(layout.schedule, channels, channel, 2, side=LAST, shadow_id=0)
            self._inlets.append(Inlet(plan, stream, self.sets, first=0, joined=0))
        self._nbytes = sum(inlet.layout.nbytes for inlet in self._inlets)
        self._readers = [Reader(f"nic-{i}", self._release, lambda _: None) for i in range(channels)]
        for inlet, sock, reader in zip(self._inlets, socks, self._readers, strict=True):
            inlet.attach(socket.socket(fileno=os.dup(sock.fileno())))
            reader.add(inlet)

    @property
    def received(self) -> int:
        """Number of received bytes."""
        return sum(inlet.received_bytes for inlet in self._inlets)

    def settle(self) -> None:
        """Wait until all memory of both sets has been written once."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        while self.received < 2 * self._nbytes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {self.received} bytes over loopback in {_CONNECT_SECONDS:g} s")
            time.sleep(_TICK_SECONDS)

    def close(self) -> None:
        """End the threads, without closing the connections."""
        for reader in self._readers:
            reader.stop()

    def _release(self) -> None:
        self.sets.released = min(-1 if inlet.whole is None else inlet.whole for inlet in self._inlets)
        for reader in self._readers:
            reader.wake()
