"""A TLS handshake of a client's certificate with itself: OpenSSL tells whether all of its files fit together.

It takes 2 ms, and no library but Python's. What does not fit, and why, is for `folder_checks`.
"""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from checkmate.keys.roles import CERT_FILE, KEY_FILE, URI_SCHEME

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ROUNDS: Final = 4
"""More than a handshake has."""


def end_of_client(folder: Path, pems: tuple[bytes, bytes, bytes], uri: str) -> dt.datetime | None:
    """Return the end of a client's certificate; `None` if TLS does not accept it.

    TLS checks that the private key is the certificate's, that the authority has signed it, its dates, and
    that it may be a client's. A chain of certificates is not tried, because TLS looks at what it needs only.

    Args:
        folder: The folder of the certificate and its private key, because Python loads these from files only.
        pems: What is in the folder: the authority, the certificate, the private key.
        uri: The only URI of Checkmate's that the certificate has to have.
    """
    end = _end(folder, pems, uri)
    return end if end is not None and dt.datetime.now(dt.UTC) < end else None


@lru_cache(4)  # a start of training reads its keys several times
def _end(folder: Path, pems: tuple[bytes, bytes, bytes], uri: str) -> dt.datetime | None:
    ca, cert, _ = pems
    if cert.count(b"-----BEGIN ") != 1 or b"-----BEGIN CERTIFICATE-----" not in cert:
        return None
    try:
        peer = _peer(folder / CERT_FILE, folder / KEY_FILE, ca)
    except (ssl.SSLError, OSError, ValueError):
        return None
    if peer is None or [
        uri_shown for uri_shown in uris_of_socket(peer) if uri_shown.startswith(URI_SCHEME)
    ] != [uri]:
        return None
    month, day, clock, year, _ = peer["notAfter"].split()  # `Jan  5 09:34:43 2028 GMT`
    time = dt.time.fromisoformat(clock)
    return dt.datetime.combine(dt.date(int(year), _MONTHS.index(month) + 1, int(day)), time, dt.UTC)


def uris_of_socket(peer: Mapping[str, Any] | None) -> list[str]:
    """Return the URIs in the certificate of a socket's peer. `peer`: the result of `getpeercert`."""
    return [value for kind, value in (peer or {}).get("subjectAltName", ()) if kind == "URI"]


def _peer(cert: Path, key: Path, ca: bytes) -> Mapping[str, Any] | None:
    """Return the certificate that a server has accepted; `None` if the handshake has not ended."""
    serves, asks = (ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    asks.check_hostname = False
    asks.verify_mode = ssl.CERT_NONE  # what is on trial is the client's side
    serves.verify_mode = ssl.CERT_REQUIRED
    serves.load_verify_locations(cadata=ca.decode("ascii"))
    for context in (serves, asks):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(cert, key, _no_password)  # else OpenSSL would ask on the terminal
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serves.wrap_bio(to_server, to_client, server_side=True)
    client = asks.wrap_bio(to_client, to_server)
    for _ in range(_ROUNDS):
        are_complete = [_goes_on(side) for side in (client, server)]
        if all(are_complete):
            return server.getpeercert()
    return None


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


def _goes_on(side: ssl.SSLObject) -> bool:
    """Do what a side can do; return whether its handshake has ended."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
