"""The threads of a node's streams: one per NIC reads them; one per stream connects it in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from pyroute2 import IPRoute

from checkmate.base.wording import counted
from checkmate.events.kinds import STREAM_CONNECTED, STREAM_FAILED
from checkmate.job.schema import Job
from checkmate.output.log_lines import GatheredLog, first_and_count
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import locks
from checkmate.shadow.receive.connect import StreamError, connect_stream, node_time
from checkmate.shadow.receive.hold_plans import StreamPlan, TaggedStreamPlan
from checkmate.shadow.receive.inlet import Inlet, ReadResult


class Reader:
    """A thread that reads the streams of one NIC.

    It calls `on_iteration` after the last byte of an iteration of a stream (of all of a hold's, if these are
    parts), and `on_broken` when a connection
    breaks. The thread holds no lock during these calls.
    """

    def __init__(
        self, name: str, on_iteration: Callable[[], None], on_broken: Callable[[Inlet], None]
    ) -> None:
        self.bytes = 0
        self._on_iteration = on_iteration
        self._on_broken = on_broken
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lock = locks.ordered_lock("reader")
        self._inlets: dict[int, Inlet] = {}
        self._stopping = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, inlet: Inlet) -> None:
        """Start to read a stream, which has its socket already."""
        with self._lock:
            if inlet.socket is not None and not self._is_closed:
                self._epoll.register(inlet.socket, select.EPOLLIN)
                self._inlets[inlet.socket.fileno()] = inlet

    def wake(self) -> None:
        """Look at all streams, because a set of buckets was released or a stream was closed."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread and close all sockets."""
        self._stopping = True
        self.wake()
        self._thread.join()
        for inlet in list(self._inlets.values()):
            self._drop(inlet)
        with self._lock:
            self._is_closed = True
            self._epoll.close()
            os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            for fd, _ in self._epoll.poll():
                if fd == self._wake:
                    self._look_again()
                elif inlet := self._inlets.get(fd):
                    self._turn(inlet)

    def _look_again(self) -> None:
        os.eventfd_read(self._wake)
        for inlet in list(self._inlets.values()):
            if inlet.paused or inlet.closed:
                self._turn(inlet)

    def _turn(self, inlet: Inlet) -> None:
        before, iteration = inlet.received_bytes, inlet.iteration
        took = inlet.take()
        self.bytes += max(0, inlet.received_bytes - before)  # it may have joined again meanwhile
        if inlet.iteration != iteration and inlet.take_news():
            self._on_iteration()
        if took is not ReadResult.ENDED:
            self._pause(inlet, took is ReadResult.PAUSED)
            return
        self._drop(inlet)
        if not inlet.closed:
            self._on_broken(inlet)

    def _pause(self, inlet: Inlet, paused: bool) -> None:
        """Pause or resume a stream. A paused one is edge-triggered, or a broken connection would spin."""
        if inlet.paused == paused or inlet.socket is None:
            return
        self._epoll.modify(inlet.socket, select.EPOLLET | select.EPOLLRDHUP if paused else select.EPOLLIN)
        inlet.paused = paused

    def _drop(self, inlet: Inlet) -> None:
        sock = inlet.socket
        if sock is None:
            return
        self._inlets.pop(sock.fileno(), None)
        with contextlib.suppress(OSError):  # never registered
            self._epoll.unregister(sock)
        sock.close()
        inlet.socket, inlet.paused = None, False


_TIMEOUT = 5.0
_BACKOFF = (0.1, 2.0)
_STEADY = 10.0
"""A stream whose connection lasted this many seconds is reconnected without a pause."""


class StreamSource(Protocol):
    """Where a node's streams come from: it connects inlets, and has the threads that read them."""

    @property
    def readers(self) -> Sequence[Reader]:
        """The threads that read streams."""

    def connect(self, inlet: Inlet, begin: pb.BeginRequest, *, again: bool = False) -> None:
        """Start to connect a stream at the inlet's position, in a start of training. Not thread-safe.

        `again` if the connection broke.
        """

    def received(self) -> list[tuple[str, int]]:
        """Return the bytes that have come to each address."""
        ...

    def follow(self, job: Job) -> None:
        """Take streams of a job file in which the ranks have changed."""

    def stop(self) -> None:
        """Connect no more, and end the readers."""


MakeSource = Callable[[Callable[[], None], Callable[[Inlet], None]], StreamSource]
"""Makes a node's source. Gets what to call after a connection or an iteration, and with a broken inlet."""


class Connector:
    """The streams of copies by switches. Each NIC has a reader."""

    def __init__(
        self,
        nic_ips: Sequence[str],
        receive_buffer: int,
        hello_key: bytes,
        on_change: Callable[[], None],
        on_broken: Callable[[Inlet], None],
    ) -> None:
        self.addresses = nic_ips
        self.readers = [Reader(f"nic {ip}", on_change, on_broken) for ip in nic_ips]
        self._devices = {ip: device_of(ip) for ip in nic_ips}
        self._receive_buffer = receive_buffer
        self._hello_key = hello_key
        self._on_change = on_change
        self._stopping = threading.Event()
        self._failures = GatheredLog(
            logging.WARNING, first_and_count, lambda lines: STREAM_FAILED(count=len(lines), why=lines[0])
        )
        self._connected = GatheredLog[StreamPlan](
            logging.DEBUG, _connected_line, lambda plans: STREAM_CONNECTED(count=len(plans))
        )
        self._turns: defaultdict[StreamPlan, threading.Lock] = defaultdict(
            lambda: locks.ordered_lock("attempt")
        )
        self._attached: dict[StreamPlan, float] = {}
        """Time at which each stream was last connected."""
        self._pauses: dict[StreamPlan, float] = {}
        """Seconds to wait before the next attempt."""

    def connect(self, inlet: Inlet, begin: pb.BeginRequest, *, again: bool = False) -> None:
        """Start to connect a stream at the inlet's position. Not thread-safe.

        `again` if the connection broke: after a growing pause if this happens often.
        """
        incarnation = begin.incarnation
        if not again or time.monotonic() - self._attached.get(inlet.plan, 0.0) > _STEADY:
            self._pauses.pop(inlet.plan, None)
        self._turns[inlet.plan]  # creates it, so that threads need not
        name = f"connect {inlet.plan}"
        threading.Thread(target=self._connect, args=(inlet, incarnation), name=name, daemon=True).start()

    def received(self) -> list[tuple[str, int]]:
        """Return the bytes that have come to each address."""
        return [(ip, reader.bytes) for ip, reader in zip(self.addresses, self.readers, strict=True)]

    def follow(self, job: Job) -> None:
        """Take streams of a job file in which the ranks have changed: each names its own addresses."""

    def stop(self) -> None:
        """Stop all attempts, and end the readers."""
        self._stopping.set()
        self._failures.flush()
        self._connected.flush()
        for reader in self.readers:
            reader.stop()

    def _connect(self, inlet: Inlet, incarnation: int) -> None:
        reason = ""
        self._pause(inlet.plan)
        while not (inlet.closed or self._stopping.is_set()):
            try:
                with self._turns[inlet.plan]:
                    self._try(inlet, incarnation)
                return
            except StreamError as error:
                inlet.broken = str(error)
                if inlet.broken != reason:
                    reason = inlet.broken
                    self._failures.add(f"{reason}; retrying")
                self._pause(inlet.plan)

    def _pause(self, plan: StreamPlan) -> None:
        """Wait before an attempt: not at all before the first, then longer each time."""
        pause = self._pauses.get(plan, 0.0)
        self._pauses[plan] = min(max(2 * pause, _BACKOFF[0]), _BACKOFF[1])
        self._stopping.wait(pause)

    def _try(self, inlet: Inlet, incarnation: int) -> None:
        """Try once. Attempts take turns, or a late hello of a closed inlet could replace its successor."""
        plan = inlet.plan
        if inlet.closed:
            return
        assert isinstance(plan, TaggedStreamPlan)
        sock = connect_stream(
            plan.nic_ip,
            plan.stub,
            plan.hello(inlet.position, incarnation, node_time()),
            self._hello_key,
            device=self._devices[plan.nic_ip],
            receive_buffer=self._receive_buffer,
            timeout=_TIMEOUT,
        )
        if not inlet.attach(sock):
            sock.close()
            return
        self._attached[plan] = time.monotonic()
        self.readers[plan.nic].add(inlet)
        self._connected.add(plan)
        self._on_change()


def _connected_line(plans: Sequence[StreamPlan]) -> str:
    return f"{counted(len(plans), 'stream is', 'streams are')} connected"


def device_of(ip: str) -> str | None:
    """Return the interface with this address, or `None` if none lists it, as within 127.0.0.0/8."""
    with IPRoute() as route:
        for message in route.get_addr(address=ip):
            index = message["index"]
            return str(route.get_links(index)[0].get_attr("IFLA_IFNAME"))
    return None
