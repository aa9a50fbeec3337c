"""Channels to shadow nodes, and what they serve with: limits, keepalive, and TLS if the job has it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import grpc

from checkmate.job.schema import Job, MgmtTls

MESSAGE_BYTES: Final = 256 << 20
"""A record has all of a model's buffers; parameters go in pieces of 1 MiB."""

WINDOW_BYTES: Final = 4 << 20
"""As much moves in a round trip."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)
"""Of servers and channels. Without a local pool, a channel would share the connection of an earlier one.

To find how large a window should be, gRPC sends a ping for every message, which is a third of what a record
costs a trainer: it is large from the start instead.
"""


class TlsError(RuntimeError):
    """A file of `mgmt_tls` can't be used."""

    exit_code = 2


def open_channel(job: Job, node_id: int) -> grpc.Channel:
    """A channel to a shadow node. It connects by itself, at the first call; `TlsError` for a file."""
    address = job.node(node_id).mgmt
    if job.mgmt_tls is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    ca, cert, key = _files(job.mgmt_tls)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=OPTIONS)


def server_credentials(tls: MgmtTls) -> grpc.ServerCredentials:
    """What a node serves with; clients must show a certificate of the same authority."""
    ca, cert, key = _files(tls)
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


def client_context(tls: MgmtTls) -> ssl.SSLContext:
    """Return what a trainer connects with, beside gRPC. `TlsError` for a file that can't be used."""
    return _context(ssl.Purpose.SERVER_AUTH, tls)


def server_context(tls: MgmtTls) -> ssl.SSLContext:
    """Return what a node serves with, beside gRPC. `TlsError` for a file that can't be used."""
    context = _context(ssl.Purpose.CLIENT_AUTH, tls)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(purpose: ssl.Purpose, tls: MgmtTls) -> ssl.SSLContext:
    ca, _, _ = _files(tls)
    try:
        context = ssl.create_default_context(purpose, cadata=ca.decode("ascii"))
        context.load_cert_chain(tls.cert, tls.key)
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"can't use the TLS files {tls.ca}, {tls.cert} and {tls.key}: {error}") from None
    return context


def _files(tls: MgmtTls) -> tuple[bytes, bytes, bytes]:
    return _read(tls.ca), _read(tls.cert), _read(tls.key)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsError(f"can't read the TLS file {file}: {error.strerror}") from None
