"""Admission of callers: role and host of each RPC, and of each connection for step records."""

from __future__ import annotations

import math
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from functools import wraps
from ipaddress import ip_address
from typing import Any, Final

import grpc

from checkmate.base.waiting_calls import host_of_call
from checkmate.job.schema import Job
from checkmate.keys.callers import GRADIENT_STREAM, STEP_RECORDS, CallerRefused, caller_role, check_call
from checkmate.keys.contexts import server_context, uris_of_call
from checkmate.keys.folder import RoleKeys
from checkmate.keys.roles import Role, node_hosts
from checkmate.keys.tls_trial import uris_of_socket
from checkmate.output.log_lines import StrangerLog
from checkmate.rpc.channels import HANDSHAKE_SECONDS

_RESOLVED_SECONDS: Final = 10.0
_SERVICE: Final = "/checkmate.v1.Shadow"

_KINDS: Final = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""Attribute and maker of a handler, by whether request and response are streams."""


class Addresses:
    """The addresses of hosts, each looked up at most once in `seconds`, however often nodes call."""

    def __init__(self, seconds: float = _RESOLVED_SECONDS) -> None:
        self._seconds = seconds
        self._resolved: dict[str, tuple[float, list[str]]] = {}

    def lookup(self, host: str) -> list[str]:
        """Return a host's addresses; none if its name cannot be resolved."""
        looked_up, addresses = self._resolved.get(host, (-math.inf, []))
        if time.monotonic() - looked_up >= self._seconds:
            addresses = _resolved(host)
            self._resolved[host] = (time.monotonic(), addresses)
        return addresses


class CallerCheck(grpc.ServerInterceptor):
    """Refuses each RPC of the node's service that its caller's role may not make."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._addresses = Addresses()
        self._log = StrangerLog()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the RPC's handler, which first checks the caller."""
        handler = continuation(handler_call_details)
        service, _, rpc = str(handler_call_details.method).rpartition("/")
        if handler is None or service != _SERVICE:
            return handler
        kind, make = _KINDS[handler.request_streaming, handler.response_streaming]
        call = getattr(handler, kind)

        @wraps(call)
        def check_and_call(request: Any, context: grpc.ServicerContext) -> Any:
            self._check(rpc, context)
            return call(request, context)

        checked_handler: grpc.RpcMethodHandler[Any, Any] = make(
            check_and_call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return checked_handler

    def _check(self, rpc: str, context: grpc.ServicerContext) -> None:
        host = host_of_call(context.peer())
        try:
            check_caller(rpc, uris_of_call(context.auth_context()), host, self._job, self._addresses)
        except CallerRefused as error:
            self._log.line(f"refused a call from {host}: {error}")
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))


class CallerGate:
    """TLS of connections for step records or gradients, and the check of who has opened them."""

    def __init__(self, job: Job, keys: RoleKeys, call: str = STEP_RECORDS) -> None:
        """Create it, for a call of `keys.callers`. Raise `KeysError` if TLS refuses the keys."""
        self._job, self._call = job, call
        self._addresses = Addresses()
        self._context = server_context(keys)
        if call == GRADIENT_STREAM:
            self._context.num_tickets = 0  # they come after the handshake: nothing may (`wire.copies`)

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """Return a TLS connection that has not begun its handshake. Raise `OSError` if `sock` is broken."""
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def admit(self, sock: socket.socket, host: str) -> None:
        """Complete the handshake and check the caller.

        Raises:
            OSError: It is not TLS, or has no certificate of the job's authority, or takes too long.
            CallerRefused: Its role may not send step records.
        """
        assert isinstance(sock, ssl.SSLSocket)
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.do_handshake()
        self.check(sock, host)

    def check(self, sock: ssl.SSLSocket, host: str) -> None:
        """Raise `CallerRefused` if the caller's role may not do that, after the handshake."""
        check_caller(self._call, uris_of_socket(sock.getpeercert()), host, self._job, self._addresses)


def check_caller(rpc: str, uris: Iterable[str], host: str, job: Job, addresses: Addresses) -> None:
    """Raise `CallerRefused` unless a certificate's role may make a call from a host.

    Args:
        rpc: The RPC's name, or `STEP_RECORDS`.
        uris: The URIs in the caller's certificate.
        host: The caller's IP address.
        job: The job of this shadow node.
        addresses: Those of shadow nodes' hosts that are DNS names.
    """
    role = caller_role(uris, job)
    names = [name for name in node_hosts(job) if not _is_address(name)] if role is Role.SHADOW else []
    check_call(rpc, role, host, job, {name: addresses.lookup(name) for name in names})


def _resolved(name: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []  # its node is refused until the name can be resolved
    return [str(address[0]) for *_, address in infos]


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
