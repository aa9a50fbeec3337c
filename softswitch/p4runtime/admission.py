"""Admission of calls: certificates, and bounds of the workers and the memory that a client can hold.

Messages reach it as bytes, because grpcio keeps about 20 KB for each one for which a deserialiser raises. A
write is parsed only once its head has shown that its sender is primary.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from checkmate.base.waiting_calls import CallGuard, host_of_call
from softswitch.p4runtime.fieldcodecs import invalid
from softswitch.program.state import StatusError

log = logging.getLogger(__name__)

SCHEME = "checkmate:"
CONTROLLER = re.compile(r"checkmate:[^/]+/controller")
MAX_LISTING = 100
"""Characters of a stranger's text in a message."""
HEAD = ("device_id", "election_id", "role")
"""Fields by which a request names its sender."""
Call = Callable[[Any, grpc.ServicerContext], Any]


def check_controller(auth: Mapping[str, Any]) -> None:
    """Check that a certificate is one of role controller, of any job.

    `auth` is the result of `auth_context` of gRPC's servicer context, whose values are sequences of bytes.

    Raises:
        StatusError: UNAUTHENTICATED. The certificate has no URI of Checkmate, another one, or several.
    """
    uris = [uri.decode("ascii", "replace") for uri in auth.get("peer_uri", ())]
    checkmate_uris = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(checkmate_uris) != 1 or not CONTROLLER.fullmatch(checkmate_uris[0]):
        listing = ", ".join(checkmate_uris)[:MAX_LISTING] or f"no URI that begins with {SCHEME}"
        raise StatusError(
            "UNAUTHENTICATED",
            f"the client's certificate has {listing}; it must have one, checkmate:JOB/controller",
        )


class CallAdmission:
    """Wraps calls, so that their requests come in time, from clients that may call, and can be read.

    With `identified` clients, it refuses those without a controller's certificate before they send a request.
    """

    def __init__(self, calls: CallGuard, identified: bool) -> None:
        self._calls, self._identified = calls, identified

    def first(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Return a call's first message; raise `StatusError` if there is none, or the client may not call."""
        if self._identified:
            try:
                check_controller(context.auth_context())
            except StatusError as error:
                log.warning("a call from %s was refused: %s", host_of_call(context.peer()), error)
                raise
        with self._calls.waiting(context, first=True):
            data = next(requests, None)
        if data is None:
            raise invalid("the request is missing")
        return data

    def unary(self, call: Call, parse: Callable[[bytes], Any]) -> Call:
        """Return a call with one request and one answer, which gets its request's bytes."""

        def guarded(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with status(context):
                return call(parse(self.first(requests, context)), context)

        return guarded

    def answers(self, call: Call, parse: Callable[[bytes], Any]) -> Call:
        """Return a call with one request and many answers, which its client must read."""

        def guarded(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            with status(context):
                for answer in call(parse(self.first(requests, context)), context):
                    with self._calls.waiting(context):
                        yield answer

        return guarded

    def stream(self, call: Call, parse: Callable[[bytes], Any]) -> Call:
        """Return a call with many requests, of which the first must come in time."""

        def guarded(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            with status(context):
                first = self.first(requests, context)
                yield from call(map(parse, chain([first], requests)), context)

        return guarded


@contextmanager
def status(context: grpc.ServicerContext) -> Iterator[None]:
    """End the call with the status of a `StatusError`."""
    try:
        yield
    except StatusError as error:
        context.abort(grpc.StatusCode[error.code], str(error))


def parser(
    kind: type[Message], most: int, check: Callable[[Any], None] | None = None
) -> Callable[[bytes], Any]:
    """Return a function that parses messages, and raises `StatusError` for those that cannot be.

    Args:
        kind: The type of the messages.
        most: Bytes that a message may have.
        check: Gets the message's head before the rest is parsed, and raises `StatusError` to refuse it.
    """
    name = kind.DESCRIPTOR.name
    head = _head_type(kind) if check else None

    def parse(data: bytes) -> Any:
        if len(data) > most:
            raise StatusError("RESOURCE_EXHAUSTED", f"{name} of {len(data)} bytes; it may have {most}")
        try:
            if head is not None and check is not None:
                check(head.FromString(data))
            return kind.FromString(data)
        except DecodeError:
            raise invalid(f"{name} of {len(data)} bytes is not readable") from None

    return parse


def _head_type(kind: type[Message]) -> type[Message]:
    """Return the type of a request's head: what else the request has is skipped, as unknown fields are."""
    whole = kind.DESCRIPTOR
    name = f"{whole.name}Head"
    file = descriptor_pb2.FileDescriptorProto(
        name=f"softswitch/{name}.proto", package="softswitch", syntax="proto3", dependency=[whole.file.name]
    )
    described = descriptor_pb2.DescriptorProto()
    whole.CopyToProto(described)
    fields = [field for field in described.field if field.name in HEAD]
    file.message_type.add(name=name, field=fields)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"softswitch.{name}"))
