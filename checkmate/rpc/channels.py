"""gRPC channels to shadow nodes, and server settings: limits, keepalive, and TLS."""

from __future__ import annotations

import json
from typing import Final

import grpc

from checkmate.job.schema import Job
from checkmate.keys.contexts import channel_credentials
from checkmate.keys.folder import RoleKeys
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import ANSWER_BYTES

MESSAGE_BYTES: Final = 256 << 20
"""Enough for a record with all buffers of a model; parameters are sent in pieces of 1 MiB."""

WINDOW_BYTES: Final = 4 << 20
"""Data per round trip."""

HANDSHAKE_SECONDS: Final = 5
"""How long a connection may take for its TLS handshake."""

SUPERSEDED: Final = grpc.StatusCode.ABORTED
"""The status of a `Begin` of a start of training that a restart has ended for good."""

OPTIONS: Final = (
    ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
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

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Shadow"]
_ANSWERS: Final = {
    "methodConfig": [
        {
            "name": [
                {"service": _SERVICE.full_name, "method": method.name}
                for method in _SERVICE.methods
                if not method.server_streaming
            ],
            "maxResponseMessageBytes": ANSWER_BYTES,
        }
    ]
}
"""gRPC's service config of channels: a longer answer is refused by its length, before it is received."""
_CHANNEL_OPTIONS: Final = (*OPTIONS, ("grpc.service_config", json.dumps(_ANSWERS)))


def open_channel(job: Job, node_id: int, keys: RoleKeys | None) -> grpc.Channel:
    """Return a channel to a shadow node, with TLS if there are keys. It connects at the first call."""
    address = job.node(node_id).mgmt
    if keys is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, channel_credentials(keys), options=_CHANNEL_OPTIONS)
