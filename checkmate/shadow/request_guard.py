"""Protects the gRPC server from requests that do not come, do not end, or cannot be read.

Deserialisers do not raise, because grpcio keeps about 16 KB for each message for which one does. Recovery
has workers of its own, so that transfers of state cannot delay it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from checkmate.base.waiting_calls import CallGuard
from checkmate.shadow.logic.group import CallRefused

IDLE_SECONDS: Final = 60.0
"""Limit of the time that a stream, once begun, waits for its client to send or to read."""
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


class RequestGuard:
    """Wraps the handlers of services, so that their requests come in time and can be read."""

    def __init__(self, calls: CallGuard) -> None:
        self._calls = calls

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
                with self._calls.waiting(context):
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
        with self._calls.waiting(context, first=True):
            message = next(requests, None)
        while message is not None:
            if isinstance(message, Unreadable):
                raise CallRefused(message.why)
            yield message
            if method in _PATIENT:
                message = next(requests, None)
            else:
                with self._calls.waiting(context):
                    message = next(requests, None)


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
