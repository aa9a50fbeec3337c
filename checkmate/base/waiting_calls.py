"""Calls of a gRPC server that wait for their clients: how long, and how many at a time.

A client that opens calls and sends nothing, or reads nothing, would otherwise keep a worker with each. A few
calls may wait for long, because a network may be slow; many of one host may not. Two policies say what
happens to them, and one guard carries that out.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol
from urllib.parse import unquote

import grpc

FIRST_SECONDS: Final = 5.0
"""Limit of the time that a call waits for its first request."""
MAX_HOST: Final = 8
"""Calls of one host that may wait, without being a crowd."""
MAX_TOTAL: Final = 24
"""Calls of all hosts that may wait, if the oldest ends otherwise."""
CROWDED_SECONDS: Final = 0.25
"""Limit of the time that calls of a crowd wait."""
REMEMBERED_SECONDS: Final = 10.0
"""Time during which a host that was a crowd may have no more than `MAX_HOST` calls that wait."""
_TICK_SECONDS: Final = 0.1


@dataclass(slots=True)
class _Wait:
    host: str
    since: float
    first: bool
    seconds: float


class WaitPolicy(Protocol):
    """The calls that wait for their clients at the moment, by key, and which of them must end. Pure."""

    def begin(self, key: Hashable, host: str, now: float, *, first: bool) -> Sequence[Hashable] | None:
        """Record that a call waits, for its first request or later.

        Return other calls, which are forgotten, that must end for it; `None` if it is refused.
        """

    def end(self, key: Hashable) -> bool:
        """Record that a call does not wait any more. Return false if it had to end."""

    def late(self, now: float) -> Sequence[Hashable]:
        """Return, and forget, the calls that have waited too long."""


class _Waits:
    """What both policies know: the calls that wait, the oldest first."""

    def __init__(self) -> None:
        self._waits: dict[Hashable, _Wait] = {}

    def end(self, key: Hashable) -> bool:
        """Record that a call does not wait any more. Return false if it had to end."""
        return self._waits.pop(key, None) is not None

    def _take(self, is_late: Callable[[_Wait], bool]) -> list[Hashable]:
        """Return, and forget, the calls that are late."""
        keys = [key for key, wait in self._waits.items() if is_late(wait)]
        for key in keys:
            del self._waits[key]
        return keys


class CrowdsRefused(_Waits):
    """Refuses calls of a host of which too many wait: other hosts' calls and those at work go on.

    For a server whose calls take long, and whose clients may be slow: one with its request never ends early.
    """

    def __init__(self, later_seconds: float) -> None:
        """Set the time for which a call that has begun may wait, for requests or a reader."""
        super().__init__()
        self._later_seconds = later_seconds
        self._crowds: dict[str, float] = {}  # when a host was last a crowd

    def begin(self, key: Hashable, host: str, now: float, *, first: bool) -> Sequence[Hashable] | None:
        """Record that a call waits; return `None` if its host has too many that wait for a first request."""
        remembered = now - self._crowds.get(host, -REMEMBERED_SECONDS) < REMEMBERED_SECONDS
        if first and remembered and self._counts()[host] >= MAX_HOST:
            return None
        self._waits[key] = _Wait(host, now, first, FIRST_SECONDS if first else self._later_seconds)
        return ()

    def late(self, now: float) -> Sequence[Hashable]:
        """Return, and forget, the calls that have waited too long, or less if they are a crowd."""
        self._crowds = {host: at for host, at in self._crowds.items() if now - at < REMEMBERED_SECONDS}
        crowds = {host for host, count in self._counts().items() if count > MAX_HOST}
        hurried = crowds | self._crowds.keys()

        def is_late(wait: _Wait) -> bool:
            seconds = CROWDED_SECONDS if wait.first and wait.host in hurried else wait.seconds
            return now - wait.since > seconds

        late_hosts = {wait.host for wait in self._waits.values() if is_late(wait)}
        self._crowds.update(dict.fromkeys(late_hosts & crowds, now))
        return self._take(is_late)

    def _counts(self) -> Counter[str]:
        return Counter(wait.host for wait in self._waits.values() if wait.first)


class OldestEnds(_Waits):
    """Ends the call that has waited for longest if too many wait, so that a new one is always admitted.

    For a server whose calls have their requests within microseconds, and whose answers are read at once.
    """

    def begin(self, key: Hashable, host: str, now: float, *, first: bool) -> Sequence[Hashable] | None:
        """Record that a call waits; return the oldest one of a crowd, which must end for it."""
        counts = Counter(wait.host for wait in self._waits.values())
        crowd = None
        if counts[host] >= MAX_HOST:
            crowd = host
        elif len(self._waits) >= MAX_TOTAL:
            ((crowd, _),) = counts.most_common(1)
        oldest = next((key for key, wait in self._waits.items() if wait.host == crowd), None)
        if oldest is not None:
            del self._waits[oldest]
        self._waits[key] = _Wait(host, now, first, FIRST_SECONDS)
        return () if oldest is None else (oldest,)

    def late(self, now: float) -> Sequence[Hashable]:
        """Return, and forget, the calls that have waited too long."""
        return self._take(lambda wait: now - wait.since > wait.seconds)


class CallGuard:
    """Ends calls that wait too long for their clients, between `start` and `stop`."""

    def __init__(self, policy: WaitPolicy) -> None:
        self._policy = policy
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
            to_end = self._policy.begin(key, host, time.monotonic(), first=first)
            if to_end is not None:
                self._contexts[key] = context
            ended = [self._contexts.pop(ended_key) for ended_key in to_end or ()]
        for ended_context in ended:
            ended_context.cancel()
        if to_end is None:
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{host} has too many calls that wait for it")
        in_time = False
        try:
            yield
        finally:
            with self._lock:
                in_time = self._policy.end(key)
                self._contexts.pop(key, None)
        if not in_time:  # its request came while it was ended: its client has another answer already
            _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the client kept the call waiting")

    def _watch(self) -> None:
        while not self._stopping.wait(_TICK_SECONDS):
            with self._lock:
                late = [self._contexts.pop(key) for key in self._policy.late(time.monotonic())]
            for context in late:
                context.cancel()


def host_of_call(peer: str) -> str:
    """Return the IP address in the result of `peer()` of gRPC's servicer context, `ipv4:10.0.0.1:4711`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, why: str) -> NoReturn:
    with suppress(Exception):  # `abort` always raises one, which only gRPC's own threads expect
        context.abort(code, why)
    raise grpc.RpcError
