"""The gRPC server of the service."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from finsy.proto import p4r

from checkmate.base.waiting_calls import MAX_TOTAL, CallGuard, OldestEnds
from softswitch.p4runtime.admission import CallAdmission, parser
from softswitch.p4runtime.service import P4RuntimeService
from softswitch.p4runtime.session import MAX_STREAMS

MAX_CONNECTIONS = 128
"""Connections at a time; each takes a descriptor."""
HANDSHAKE_MS = 5_000
"""Milliseconds until a connection has shown that it is HTTP/2."""
IDLE_MS = 30_000
"""Milliseconds after which a connection without calls is closed."""
MAX_CALLS = 32
"""Calls of one connection at a time; further ones wait at the client."""
WORKERS = 16
"""Workers of a pool that calls of clients that keep them waiting cannot take."""
LARGE = 16 << 20
"""Bytes of a Write or a pipeline config, the largest messages."""
MEDIUM = 1 << 20
SMALL = 1 << 16
STOP_GRACE_S = 0.2


class P4RuntimeServer:
    """The server, from its creation to `stop`.

    With credentials, its clients need a controller's certificate. `port` is its TCP port. Raise `OSError` if
    the address is invalid or in use.
    """

    def __init__(
        self, service: P4RuntimeService, address: str, credentials: grpc.ServerCredentials | None
    ) -> None:
        _check_address(address)
        self._calls = CallGuard(OldestEnds())
        self._guard = CallAdmission(self._calls, identified=credentials is not None)
        self._pools: list[ThreadPoolExecutor] = []
        self._server = grpc.server(
            self._pool("calls", MAX_TOTAL + WORKERS),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.max_concurrent_streams", MAX_CALLS),
                ("grpc.max_receive_message_length", LARGE),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("p4.v1.P4Runtime", self._handlers(service)),)
        )
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self._calls.start()
        self._server.start()

    def stop(self) -> None:
        """End all calls, and wait until they have ended."""
        self._server.stop(STOP_GRACE_S).wait()
        self._calls.stop()
        for pool in self._pools:
            pool.shutdown(wait=False)

    def _pool(self, name: str, workers: int) -> ThreadPoolExecutor:
        self._pools.append(ThreadPoolExecutor(workers, thread_name_prefix=name))
        return self._pools[-1]

    def _handlers(self, service: P4RuntimeService) -> dict[str, Any]:
        """Return the handlers of all calls. Streams and reads, which last, have workers of their own."""
        guard, primary = self._guard, service.check_primary
        set_config, get_config = (
            p4r.SetForwardingPipelineConfigRequest,
            p4r.GetForwardingPipelineConfigRequest,
        )
        unary = {
            "Write": guard.unary(service.Write, parser(p4r.WriteRequest, LARGE, primary)),
            "SetForwardingPipelineConfig": guard.unary(
                service.SetForwardingPipelineConfig, parser(set_config, LARGE, primary)
            ),
            "GetForwardingPipelineConfig": guard.unary(
                service.GetForwardingPipelineConfig, parser(get_config, SMALL)
            ),
            "Capabilities": guard.unary(service.Capabilities, parser(p4r.CapabilitiesRequest, SMALL)),
        }
        streams: dict[str, Any] = {
            "Read": guard.answers(service.Read, parser(p4r.ReadRequest, MEDIUM)),
            "StreamChannel": guard.stream(service.StreamChannel, parser(p4r.StreamMessageRequest, MEDIUM)),
        }
        for name, workers in (("Read", WORKERS), ("StreamChannel", MAX_STREAMS)):
            streams[name].experimental_thread_pool = self._pool(name, MAX_TOTAL + workers)
        serialize = _serialize
        return {
            name: grpc.stream_unary_rpc_method_handler(call, None, serialize) for name, call in unary.items()
        } | {
            name: grpc.stream_stream_rpc_method_handler(call, None, serialize)
            for name, call in streams.items()
        }


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _check_address(address: str) -> None:
    """Raise a readable `OSError` for an unusable address; gRPC reports it on stderr only."""
    host, _, port = address.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in addresses:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from None
