"""gRPC channels to shadow nodes, and server settings: limits, keepalive, and TLS if the job has it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import grpc

from checkmate.job.schema import Job, MgmtTls

MESSAGE_BYTES: Final = 256 << 20
"""Enough for a record with all buffers of a model; parameters are sent in pieces of 1 MiB."""

WINDOW_BYTES: Final = 4 << 20
"""Data per round trip."""

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
"""Options of servers and channels.

Without a local pool, a channel would share the connection of an earlier one. Without `bdp_probe=0`, gRPC
would send a ping for every message to find the size of the window, at a third of the cost of a record. The
window is large from the start instead.
"""


class TlsError(RuntimeError):
    """A file of `mgmt_tls` cannot be used."""

    exit_code = 2


def open_channel(job: Job, node_id: int) -> grpc.Channel:
    """Return a channel to a shadow node; it connects at the first call. Raise `TlsError` if files are bad."""
    address = job.node(node_id).mgmt
    if job.mgmt_tls is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    ca, cert, key = _files(job.mgmt_tls)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=OPTIONS)


def server_credentials(tls: MgmtTls) -> grpc.ServerCredentials:
    """Return a node's server credentials. Clients need a certificate of the same authority."""
    ca, cert, key = _files(tls)
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


def client_context(tls: MgmtTls) -> ssl.SSLContext:
    """Return a trainer's TLS context for step records. Raise `TlsError` if files cannot be used."""
    return _context(ssl.Purpose.SERVER_AUTH, tls)


def server_context(tls: MgmtTls) -> ssl.SSLContext:
    """Return a node's TLS context for step records. Raise `TlsError` if files cannot be used."""
    context = _context(ssl.Purpose.CLIENT_AUTH, tls)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(purpose: ssl.Purpose, tls: MgmtTls) -> ssl.SSLContext:
    ca, _, _ = _files(tls)
    try:
        context = ssl.create_default_context(purpose, cadata=ca.decode("ascii"))
        context.load_cert_chain(tls.cert, tls.key)
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"cannot use the TLS files {tls.ca}, {tls.cert} and {tls.key}: {error}") from None
    return context


def _files(tls: MgmtTls) -> tuple[bytes, bytes, bytes]:
    return _read(tls.ca), _read(tls.cert), _read(tls.key)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsError(f"cannot read the TLS file {file}: {error.strerror}") from None
