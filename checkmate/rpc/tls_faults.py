"""What went wrong in a TLS handshake with a shadow node, in words for users. Pure."""

from __future__ import annotations

from typing import Final

_WORDS: Final = (
    (("certificate has expired", "alert certificate expired"), "a certificate has expired"),
    (
        ("certificate_verify_failed", "certificate verify failed", "hostname verification"),
        "its certificate is not one for this address by the authority in this host's folder of keys",
    ),
    (
        ("alert unknown ca", "alert_unknown_ca", "certificate required", "certificate_required"),
        "it does not accept this host's certificate, which is of another authority",
    ),
    (
        ("wrong_version_number", "wrong version number", "unexpected_eof", "has been closed (eof)"),
        "it does not use TLS: it runs with --insecure, or is an older version",
    ),
)
"""Texts of OpenSSL and BoringSSL, in lower case, with what they mean."""
_CLOSED: Final = ("failed to connect", "socket closed")
"""What gRPC reports without TLS if the node waits for a TLS handshake."""


def tls_fault(text: str) -> str | None:
    """Return what an error's text means for the user, or `None` if it is not about TLS."""
    lower = text.lower()
    for texts, words in _WORDS:
        if any(one in lower for one in texts):
            return words
    if all(one in lower for one in _CLOSED):
        return "it closed the connection: if it uses TLS, this process needs keys too"
    return None
