"""The gRPC server of the service."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
from finsy.proto import p4r_grpc

from softswitch.p4runtime.service import STREAMS_MAX, P4RuntimeService

WORKERS = 2 * STREAMS_MAX
"""Each stream occupies a thread; there are as many threads again for other RPCs."""
MESSAGE_MAX = 256 << 20


def serve(
    service: P4RuntimeService, address: str, credentials: grpc.ServerCredentials | None
) -> tuple[grpc.Server, int]:
    """Start a gRPC server; return it and its port. Raise `OSError` if the address is invalid or in use."""
    server = grpc.server(
        ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="p4runtime"),
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MESSAGE_MAX),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ("grpc.http2.max_ping_strikes", 0),
        ],
    )
    p4r_grpc.add_P4RuntimeServicer_to_server(service, server)
    _check_address(address)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    return server, port


def _check_address(address: str) -> None:
    """Raise a readable `OSError` for an unusable address; gRPC reports it on stderr only."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from None
