"""TLS with a role's keys: contexts for sockets, credentials for gRPC, and what a peer's certificate names.

Both sides show certificates of the job's authority. Clients also check the server's host name or address.
Sockets use TLS 1.3; gRPC for Python offers no choice, and uses 1.3 if both sides can.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import grpc

from checkmate.keys.errors import KeysError
from checkmate.keys.folder import RoleKeys


def client_context(keys: RoleKeys) -> ssl.SSLContext:
    """Return a context for connections to shadow nodes. Raise `KeysError` if TLS refuses the keys."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, keys)  # checks names by default


def server_context(keys: RoleKeys) -> ssl.SSLContext:
    """Return a context that requires clients' certificates. Raise `KeysError` if TLS refuses the keys."""
    return _context(ssl.PROTOCOL_TLS_SERVER, keys)


def channel_credentials(keys: RoleKeys) -> grpc.ChannelCredentials:
    """Return credentials for gRPC channels to shadow nodes."""
    return grpc.ssl_channel_credentials(keys.ca, keys.key, keys.cert)


def server_credentials(keys: RoleKeys) -> grpc.ServerCredentials:
    """Return credentials for a gRPC server that requires clients' certificates."""
    return grpc.ssl_server_credentials([(keys.key, keys.cert)], keys.ca, require_client_auth=True)


def uris_of_call(auth_context: Mapping[str, Any]) -> list[str]:
    """Return the URIs in a caller's certificate.

    `auth_context`: the result of that method of gRPC's servicer context; its values are sequences of bytes.
    """
    return [uri.decode("ascii", "replace") for uri in auth_context.get("peer_uri", ())]


def _context(protocol: int, keys: RoleKeys) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=keys.ca.decode("ascii"))
        context.load_cert_chain(keys.cert_file, keys.key_file)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise KeysError(f"TLS refuses the keys in {keys.folder}: {error}") from None
    return context
