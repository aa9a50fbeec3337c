"""Calls of a gRPC server that wait for their clients: how long, and how many at a time.

A client that opens calls and sends nothing, or reads nothing, would otherwise keep a worker with each. A few
calls may wait for long, because a network may be slow; many of one host may not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NoReturn
from urllib.parse import unquote

import grpc

FIRST_SECONDS: Final = 5.0
"""Limit of the time that a call waits for its first request."""
MAX_HOST: Final = 8
"""Calls of one host that may wait, without being a crowd."""
CROWDED_SECONDS: Final = 0.25
"""Limit of the time that calls of a crowd wait."""
REMEMBERED_SECONDS: Final = 10.0
"""Time during which a host that was a crowd may have no more than `MAX_HOST` calls that wait."""
_TICK_SECONDS: Final = 0.1


@dataclass(slots=True)
class _Wait:
    host: str
    since: float
    counts: bool
    seconds: float


class WaitingCalls:
    """The calls that wait for their clients at the moment, by key, and which have waited too long. Pure."""

    def __init__(
        self, later_seconds: float, *, later_counts: bool = False, max_total: int | None = None
    ) -> None:
        """Set the limits that servers do not have in common.

        Args:
            later_seconds: The time for which a call that has begun may wait, for requests or a reader.
            later_counts: Whether such waits can be a crowd, too: on a server whose answers are read at once.
            max_total: Calls of all hosts that may wait; beyond them, those of the host with most are a crowd.
        """
        self._later_seconds, self._later_counts = later_seconds, later_counts
        self._max_total = max_total
        self._waits: dict[Hashable, _Wait] = {}
        self._crowds: dict[str, float] = {}  # when a host was last a crowd

    def begin(self, key: Hashable, host: str, now: float, *, first: bool) -> bool:
        """Record that a call waits, for its first request or later. Return false if its host has too many."""
        wait = _Wait(
            host,
            now,
            counts=first or self._later_counts,
            seconds=FIRST_SECONDS if first else self._later_seconds,
        )
        remembered = now - self._crowds.get(host, -REMEMBERED_SECONDS) < REMEMBERED_SECONDS
        if wait.counts and remembered and self._counts()[host] >= MAX_HOST:
            return False
        self._waits[key] = wait
        return True

    def end(self, key: Hashable) -> bool:
        """Record that a call does not wait any more. Return false if it was too late."""
        return self._waits.pop(key, None) is not None

    def late(self, now: float) -> list[Hashable]:
        """Return, and forget, the calls that have waited too long."""
        self._crowds = {host: at for host, at in self._crowds.items() if now - at < REMEMBERED_SECONDS}
        counts = self._counts()
        crowds = {host for host, count in counts.items() if count > MAX_HOST}
        if self._max_total is not None and counts.total() > self._max_total:
            crowds.add(counts.most_common(1)[0][0])
        hurried = crowds | self._crowds.keys()
        keys = [
            key
            for key, wait in self._waits.items()
            if now - wait.since
            > (min(CROWDED_SECONDS, wait.seconds) if wait.counts and wait.host in hurried else wait.seconds)
        ]
        self._crowds.update((host, now) for host in {self._waits[key].host for key in keys} & crowds)
        for key in keys:
            del self._waits[key]
        return keys

    def _counts(self) -> Counter[str]:
        return Counter(wait.host for wait in self._waits.values() if wait.counts)


class CallGuard:
    """Ends calls that wait too long for their clients, between `start` and `stop`."""

    def __init__(self, calls: WaitingCalls) -> None:
        self._calls = calls
        self._contexts: dict[Hashable, grpc.ServicerContext] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="waiting calls", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    @contextmanager
    def waiting(self, context: grpc.ServicerContext, *, first: bool = False) -> Iterator[None]:
        """Note that a call waits for its client during the block, and end it if it waits too long.

        Raises:
            grpc.RpcError: The call has ended, because it waited too long or others of its host wait.
        """
        key, host = object(), host_of_call(context.peer())
        with self._lock:
            admitted = self._calls.begin(key, host, time.monotonic(), first=first)
            if admitted:
                self._contexts[key] = context
        if not admitted:
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{host} has too many calls that wait for it")
        in_time = False
        try:
            yield
        finally:
            with self._lock:
                in_time = self._calls.end(key)
                self._contexts.pop(key, None)
        if not in_time:  # its request came while it was ended: its client has another answer already
            _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the client kept the call waiting")

    def _watch(self) -> None:
        while not self._stopping.wait(_TICK_SECONDS):
            with self._lock:
                late = [self._contexts.pop(key) for key in self._calls.late(time.monotonic())]
            for context in late:
                context.cancel()


def host_of_call(peer: str) -> str:
    """Return the IP address in the result of `peer()` of gRPC's servicer context, `ipv4:10.0.0.1:4711`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, why: str) -> NoReturn:
    with suppress(Exception):  # `abort` always raises one, which only gRPC's own threads expect
        context.abort(code, why)
    raise grpc.RpcError
