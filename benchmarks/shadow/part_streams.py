"""A shadow node's receiving of parts, with copies by hosts, beside a bare `recv_into` of as many connections.

Ranks of a process each send iterations over loopback. A node's readers check the parts' MACs and write them
into buckets; the bare loop has as many threads and a buffer that it reuses. Both are measured in turns.
"""

from __future__ import annotations

import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from rich.progress import track

from benchmarks.figures import Figure, Result, ratios
from benchmarks.shadow.part_streams_main import JOB, KEY, READY, START, raise_descriptors
from checkmate.job import host_copies
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.receive.hold_plans import StreamPlan
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.shadow.receive.part_listener import PartListener
from checkmate.shadow.receive.part_streams import PartInlet
from checkmate.shadow.receive.stream_threads import Reader
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.parts import PartSlicing
from checkmate.wire.schedule import StreamName

TITLE: Final = "Shadow node, copies by hosts: bytes/s into buckets / a bare recv loop, as many connections"
STREAMS: Final = (2, 16, 256, 1024)
PAIRS, SECONDS = 9, 0.4
ELEMENTS: Final = 1 << 27
"""Of fp32 gradients: 512 MB an iteration, all streams together."""
BARE_BYTES: Final = 4 << 20
_MOST_BYTES_PER_S: Final = 14e9
_PAUSE_SECONDS: Final = 0.05
"""For the readers, to end what they have begun."""
_NEVER, _ALWAYS = -3, 1 << 40
"""Released iterations with which no set of buckets is free, or each is."""


def measure() -> list[Result]:
    """Measure with few and with many streams."""
    raise_descriptors(4 * max(STREAMS))
    results: list[Result] = []
    for streams in STREAMS:
        with received(streams, idle=True) as bare_node, received(streams) as node:
            bare, buckets = ReceivedTurns(), ReceivedTurns()
            for _ in track(range(PAIRS), f"{streams} streams", transient=True):
                bare.add(*timed(bare_node.read_bare))
                buckets.add(*timed(node.read))
                time.sleep(_PAUSE_SECONDS)
        words = (
            f"{buckets.gigabytes:.3g} / {bare.gigabytes:.3g} GB/s; processor: {buckets.cost:.3g} / "
            f"{bare.cost:.3g} s/GB"
        )
        samples = ratios(buckets.rates, bare.rates)
        label = f"buckets / bare loop, {streams} streams"
        results.append(Figure(label, samples, "", 0.9, 0.3, note=words))
    return results


class ReceivedTurns:
    """Bytes per second, and seconds of processor time per gigabyte, of each turn."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self._costs: list[float] = []

    def add(self, nbytes: int, seconds: float, processor: float) -> None:
        """Add a turn."""
        self.rates.append(nbytes / seconds)
        self._costs.append(1e9 * processor / max(1, nbytes))

    @property
    def gigabytes(self) -> float:
        """The median rate, in GB/s."""
        return statistics.median(self.rates) / 1e9

    @property
    def cost(self) -> float:
        """The median processor time, in s/GB."""
        return statistics.median(self._costs)


class IdleReader(Reader):
    """A reader that leaves its streams to somebody else."""

    def add(self, inlet: Inlet) -> None:
        """Do nothing."""


def timed(read: Callable[[float], int]) -> tuple[int, float, float]:
    """Return what a turn has read, its seconds, and this process's processor time."""
    start, processor = time.monotonic(), time.process_time()
    nbytes = read(SECONDS)
    return nbytes, time.monotonic() - start, time.process_time() - processor


class ReceivingNode:
    """A node's listener, and the ranks that are connected to it."""

    def __init__(self, stack: ExitStack, streams: int, *, idle: bool) -> None:
        """Connect ranks. If `idle`, the node's own readers do nothing."""
        job, faults = host_copies.read(
            {
                "job": JOB,
                "copies": "host",
                "ranks": streams,
                "shadow_nodes": [{"id": 0, "mgmt": "127.0.0.1:1"}],
            }
        )
        assert job is not None, faults
        layout = layout_of()
        parts = [
            layout.slicing.stream(layout.schedule, StreamName(sender, 0, 0), 1, streams)
            for sender in range(streams)
        ]
        self._sets = BucketSets(layout, 0, _NEVER, streams)
        for tensor in (tensor for tensors in self._sets.tensors for tensor in tensors.values()):
            tensor.fill_(1)  # so that its memory is there
        server = socket.create_server(("127.0.0.1", 0), backlog=streams)
        port = server.getsockname()[1]
        self._listener = PartListener(job, server, KEY, None, lambda: None, self._broken)
        if idle:
            for reader in self._listener.readers:
                reader.stop()
            self._listener.readers = [
                IdleReader("idle", lambda: None, self._broken) for _ in self._listener.readers
            ]
        stack.callback(self._listener.stop)
        self._inlets = [
            PartInlet(StreamPlan(0, 0, sender, 0), part, self._sets, first=0, joined=0)
            for sender, part in enumerate(parts)
        ]
        for inlet in self._inlets:
            self._listener.connect(inlet, pb.BeginRequest(start=START))
        nbytes = parts[0].nbytes
        most = int((PAIRS + 2) * SECONDS * _MOST_BYTES_PER_S / nbytes / streams) + 2
        arguments = [str(number) for number in (port, streams, nbytes, most)]
        command = [sys.executable, "-m", "benchmarks.shadow.part_streams_main", *arguments]
        ranks = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(ranks.kill)
        assert ranks.stdout is not None
        if ranks.stdout.readline().strip() != READY:
            raise RuntimeError("the ranks have not connected")
        self._failure = ""

    def _broken(self, inlet: Inlet) -> None:
        self._failure = f"{inlet.plan}: {inlet.broken}"

    def read(self, seconds: float) -> int:
        """Read into buckets, and return how many bytes."""
        before = sum(reader.bytes for reader in self._listener.readers)
        self._sets.release(_ALWAYS)
        self._wake()
        time.sleep(seconds)
        nbytes = sum(reader.bytes for reader in self._listener.readers) - before
        self._sets.release(_NEVER)
        if self._failure:
            raise RuntimeError(self._failure)
        return nbytes

    def read_bare(self, seconds: float) -> int:
        """Read into a buffer that is reused, with as many threads, and return how many bytes."""
        threads = len(self._listener.readers)
        counts = [0] * threads
        end = time.monotonic() + seconds

        def run(number: int) -> None:
            buffer = bytearray(BARE_BYTES)
            with select.epoll() as epoll:
                socks = {
                    inlet.socket.fileno(): inlet.socket
                    for inlet in self._inlets[number::threads]
                    if inlet.socket is not None
                }
                for descriptor in socks:
                    epoll.register(descriptor, select.EPOLLIN)
                while time.monotonic() < end:
                    for descriptor, _ in epoll.poll(0.1):
                        counts[number] += socks[descriptor].recv_into(buffer)

        readers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return sum(counts)

    def _wake(self) -> None:
        for reader in self._listener.readers:
            reader.wake()


def layout_of() -> Layout:
    """Return a layout of one shard whose buckets are divided evenly."""
    parameters = [Parameter(f"p{number}", (ELEMENTS // 8,), "float32") for number in range(8)]
    return make_layout(parameters, 1, 25 << 20, PartSlicing())


@contextmanager
def received(streams: int, *, idle: bool = False) -> Iterator[ReceivingNode]:
    """Yield a node with this number of streams."""
    with ExitStack() as stack:
        yield ReceivingNode(stack, streams, idle=idle)
