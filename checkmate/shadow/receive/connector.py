"""Connecting a node's streams in the background: one thread per stream until it is connected or closed."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from pyroute2 import IPRoute

from checkmate.shadow import locks
from checkmate.shadow.receive.connect import StreamError, connect_stream, node_time
from checkmate.shadow.receive.inlet import Inlet
from checkmate.shadow.receive.plans import StreamPlan
from checkmate.shadow.receive.reader import Reader

log = logging.getLogger("checkmate")

_TIMEOUT = 5.0
_BACKOFF = (0.1, 2.0)
_STEADY = 10.0
"""A stream whose connection lasted this many seconds is reconnected without a pause."""


class Connector:
    """Connects inlets and adds them to their NIC's reader. Calls `on_change` after each connection."""

    def __init__(
        self,
        readers: Sequence[Reader],
        nic_ips: Sequence[str],
        receive_buffer: int,
        hello_key: bytes,
        on_change: Callable[[], None],
    ) -> None:
        self._readers = readers
        self._devices = {ip: device_of(ip) for ip in nic_ips}
        self._receive_buffer = receive_buffer
        self._hello_key = hello_key
        self._on_change = on_change
        self._stopping = threading.Event()
        self._turns: defaultdict[StreamPlan, threading.Lock] = defaultdict(
            lambda: locks.ordered_lock("attempt")
        )
        self._attached: dict[StreamPlan, float] = {}
        """Time at which each stream was last connected."""
        self._pauses: dict[StreamPlan, float] = {}
        """Seconds to wait before the next attempt."""

    def connect(self, inlet: Inlet, incarnation: int, *, again: bool = False) -> None:
        """Start to connect a stream at the inlet's position. Not thread-safe.

        `again` if the connection broke: after a growing pause if this happens often.
        """
        if not again or time.monotonic() - self._attached.get(inlet.plan, 0.0) > _STEADY:
            self._pauses.pop(inlet.plan, None)
        self._turns[inlet.plan]  # creates it, so that threads need not
        name = f"connect {inlet.plan}"
        threading.Thread(target=self._connect, args=(inlet, incarnation), name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop all attempts."""
        self._stopping.set()

    def _connect(self, inlet: Inlet, incarnation: int) -> None:
        said = ""
        self._pause(inlet.plan)
        while not (inlet.closed or self._stopping.is_set()):
            try:
                with self._turns[inlet.plan]:
                    self._try(inlet, incarnation)
                return
            except StreamError as error:
                inlet.broken = str(error)
                if inlet.broken != said:
                    said = inlet.broken
                    log.warning("%s; retrying", said)
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
        self._readers[plan.nic].add(inlet)
        self._on_change()


def device_of(ip: str) -> str | None:
    """Return the interface with this address, or `None` if none lists it, as within 127.0.0.0/8."""
    with IPRoute() as route:
        for message in route.get_addr(address=ip):
            index = message["index"]
            return str(route.get_links(index)[0].get_attr("IFLA_IFNAME"))
    return None
