"""Protects the gRPC server from requests that do not come, do not end, or cannot be read.

A client that opens calls and sends no request would keep a worker with each. A few may wait for long, because
a network may be slow; many of one host may not.

Deserialisers do not raise, because grpcio keeps about 16 KB for each message for which one does. Recovery
has workers of its own, so that transfers of state cannot delay it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from checkmate.keys.contexts import host_of_call
from checkmate.shadow.logic.group import CallRefused

REQUEST_SECONDS: Final = 5.0
"""Limit of the time that a call waits for its request."""
IDLE_SECONDS: Final = 60.0
"""Limit of the time that a stream, once begun, waits for its client to send or to read."""
CROWD: Final = 8
"""If a host has, or had lately, more calls without a request, they have `CROWDED_SECONDS`."""
CROWDED_SECONDS: Final = 0.25
REMEMBERED_SECONDS: Final = 10.0
"""Time during which a host that was a crowd may have no more than `CROWD` calls without a request."""
_TICK_SECONDS: Final = 0.1
_SMALL: Final = 1 << 20
_LARGE: Final = {"Begin": 64 << 20, "Seed": 256 << 20, "Copy": 16 << 20, "Parts": 16 << 20}
"""Bytes of a request, by method. Others may have `_SMALL`."""
_PATIENT: Final = frozenset({"Commit"})
"""Streams that may be silent for long, because the other node's process may be stopped."""

Handler = Any
"""A `grpc.RpcMethodHandler`, of any request and response."""
Behavior = Callable[[Any, grpc.ServicerContext], Any]


class Unreadable:
    """In place of a request: why it cannot be read."""

    def __init__(self, why: str) -> None:
        self.why = why


def reader(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """Return a deserialiser of a method's requests that never raises."""
    most = _LARGE.get(method, _SMALL)

    def read(data: bytes) -> Any:
        if len(data) > most:
            return Unreadable(f"{method}: a message of {len(data)} bytes; it may have {most}")
        try:
            return parse(data)
        except (DecodeError, ValueError) as error:
            return Unreadable(f"{method}: unreadable message of {len(data)} bytes: {error}")

    return read


@dataclass(slots=True)
class _Wait:
    host: str
    since: float
    first: bool


class WaitingCalls:
    """The calls that wait for their clients at the moment, by key, and which have waited too long. Pure."""

    def __init__(self) -> None:
        self._waits: dict[Hashable, _Wait] = {}
        self._crowds: dict[str, float] = {}  # when a host was last a crowd

    def begin(self, key: Hashable, host: str, now: float) -> bool:
        """Record a new call, which waits for its request. Return false if its host has too many already."""
        crowded = now - self._crowds.get(host, -REMEMBERED_SECONDS) < REMEMBERED_SECONDS
        if crowded and self._count(host) >= CROWD:
            return False
        self._waits[key] = _Wait(host, now, first=True)
        return True

    def wait(self, key: Hashable, host: str, now: float) -> None:
        """Record that a call that has begun waits for its client."""
        self._waits[key] = _Wait(host, now, first=False)

    def end_wait(self, key: Hashable) -> None:
        """Record that a call does not wait any more."""
        self._waits.pop(key, None)

    def late(self, now: float) -> list[Hashable]:
        """Return, and forget, the calls that have waited too long."""
        self._crowds = {host: at for host, at in self._crowds.items() if now - at < REMEMBERED_SECONDS}
        keys = [key for key, wait in self._waits.items() if now - wait.since > self._patience(wait)]
        for host in {self._waits[key].host for key in keys if self._count(self._waits[key].host) > CROWD}:
            self._crowds[host] = now
        for key in keys:
            del self._waits[key]
        return keys

    def _patience(self, wait: _Wait) -> float:
        if not wait.first:
            return IDLE_SECONDS
        crowded = wait.host in self._crowds or self._count(wait.host) > CROWD
        return CROWDED_SECONDS if crowded else REQUEST_SECONDS

    def _count(self, host: str) -> int:
        return sum(wait.first and wait.host == host for wait in self._waits.values())


class CallGuard:
    """Ends calls that wait too long for their clients, between `start` and `stop`."""

    def __init__(self) -> None:
        self._calls = WaitingCalls()
        self._contexts: dict[object, grpc.ServicerContext] = {}
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

    def handlers(
        self, handlers: Mapping[str, Handler], pools: Mapping[str, ThreadPoolExecutor]
    ) -> dict[str, Handler]:
        """Return a service's handlers, guarded. `pools` has the workers of methods that have their own."""
        return {
            method: self._guarded(method, handler, pools.get(method)) for method, handler in handlers.items()
        }

    def _guarded(self, method: str, handler: Any, pool: ThreadPoolExecutor | None) -> Handler:
        """Return a handler that takes a stream of requests, whose first one it awaits with a deadline."""
        kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
        behavior: Behavior = next(kind for kind in kinds if kind is not None)
        streams = handler.request_streaming

        def argument(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            messages = self._messages(method, requests, context)
            return messages if streams else _only(messages, context)

        def unary(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            return behavior(argument(requests, context), context)

        def stream(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            for message in behavior(argument(requests, context), context):
                with self._waiting(context):
                    yield message

        guarded: Any = stream if handler.response_streaming else unary
        if pool is not None:
            guarded.experimental_thread_pool = pool
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(guarded, reader(handler.request_deserializer, method), handler.response_serializer)

    def _messages(self, method: str, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Yield a call's requests. Raise `CallRefused` if one cannot be read, `RpcError` if they end."""
        with self._waiting(context, first=True):
            message = next(requests, None)
        while message is not None:
            if isinstance(message, Unreadable):
                raise CallRefused(message.why)
            yield message
            if method in _PATIENT:
                message = next(requests, None)
            else:
                with self._waiting(context):
                    message = next(requests, None)

    @contextmanager
    def _waiting(self, context: grpc.ServicerContext, *, first: bool = False) -> Iterator[None]:
        """Note that a call waits for its client until the end of the block."""
        key, host, now = object(), host_of_call(context.peer()), time.monotonic()
        with self._lock:
            admitted = True
            if first:
                admitted = self._calls.begin(key, host, now)
            else:
                self._calls.wait(key, host, now)
            if admitted:
                self._contexts[key] = context
        if not admitted:
            with suppress(Exception):  # `abort` always raises one, which only gRPC's own threads expect
                context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{host} has too many calls without a request"
                )
            raise grpc.RpcError
        try:
            yield
        finally:
            with self._lock:
                self._calls.end_wait(key)
                self._contexts.pop(key, None)

    def _watch(self) -> None:
        while not self._stopping.wait(_TICK_SECONDS):
            with self._lock:
                late = [self._contexts.pop(key) for key in self._calls.late(time.monotonic())]
            for context in late:
                context.cancel()


def _only(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
    """Return a call's only request; end the call if there is none or it cannot be read."""
    try:
        message = next(messages, None)
        why = "the request is missing"
    except CallRefused as error:
        message, why = None, str(error)
    if message is None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
    return message


class Handlers:
    """In place of a server: collects the handlers that generated code adds."""

    def __init__(self) -> None:
        self.by_method: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: `add_registered_method_handlers` gets the same handlers, by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Keep a service's handlers."""
        self.by_method.update(handlers)
