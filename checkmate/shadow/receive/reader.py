"""Reading streams into their inlets: one thread per NIC, epoll, non-blocking sockets."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from checkmate.shadow import locks
from checkmate.shadow.receive.inlet import Inlet, Took


class Reader:
    """A thread that reads the streams of one NIC.

    It calls `on_iteration` after the last byte of an iteration of a stream, and `on_broken` when a connection
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
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, inlet: Inlet) -> None:
        """Start to read a stream, which has its socket already."""
        with self._lock:
            if inlet.socket is not None and not self._ended:
                self._epoll.register(inlet.socket, select.EPOLLIN)
                self._inlets[inlet.socket.fileno()] = inlet

    def wake(self) -> None:
        """Look at all streams, because a set of buckets was released or a stream was closed."""
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread and close all sockets."""
        self._stopping = True
        self.wake()
        self._thread.join()
        for inlet in list(self._inlets.values()):
            self._drop(inlet)
        with self._lock:
            self._ended = True
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
        received, iteration = inlet.received, inlet.iteration
        took = inlet.take()
        self.bytes += inlet.received - received
        if inlet.iteration != iteration:
            self._on_iteration()
        if took is not Took.ENDED:
            self._pause(inlet, took is Took.PAUSED)
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
