"""Message authentication codes: keyed BLAKE2b, 16 bytes, with a purpose of its own for each use. No I/O.

What comes in bulk has MACs instead, of GMAC, which is ten times as fast as any hash of `hashlib`.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from checkmate.keys.secret_files import SECRET_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

MAC_BYTES: Final = 16
NONCE_BYTES: Final = 16

_HELLO: Final = b"checkmate hello"
RING: Final = b"checkmate ring"
GRADIENTS: Final = b"checkmate parts"
_CODES: Final = b"checkmate codes"


class ConnectionSide(IntEnum):
    """A side of a connection."""

    CONNECTS = 0
    ACCEPTS = 1


def hello_mac(key: bytes, message: bytes) -> bytes:
    """Return the MAC, 16 bytes, of a hello. `key`: the secret `hello.key`, 32 bytes."""
    return _mac(key, _HELLO, message)


def is_hello_authentic(key: bytes, message: bytes, mac: bytes) -> bool:
    """Return whether `mac` is that of a hello, in constant time."""
    return hmac.compare_digest(hello_mac(key, message), mac)


def new_nonce() -> bytes:
    """Return 16 random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class ConnectionProof:
    """Challenge and response on one connection.

    Each side sends a nonce. Then each sends the `mac` of its own side, which only a holder of the key can
    compute, and checks the other's with `is_authentic`. A MAC of another connection, direction, purpose or
    greeting is not accepted.

    Attributes:
        key: The secret, 32 bytes: `ring.key` for a ring, `gradients.key` for streams of parts.
        greeting: The greeting of the side that connects, of any length.
        connects_nonce: The nonce of the side that connects, 16 bytes.
        accepts_nonce: The nonce of the side that accepts, 16 bytes.
        purpose: `RING` or `GRADIENTS`.

    Raises:
        ValueError: A nonce has another length.
    """

    key: bytes = field(repr=False)
    greeting: bytes
    connects_nonce: bytes
    accepts_nonce: bytes
    purpose: bytes = RING

    def __post_init__(self) -> None:
        lengths = [len(self.connects_nonce), len(self.accepts_nonce)]
        if lengths != [NONCE_BYTES, NONCE_BYTES]:
            raise ValueError(f"nonces have {NONCE_BYTES} bytes each, not {lengths[0]} and {lengths[1]}")

    def mac(self, side: ConnectionSide) -> bytes:
        """Return the MAC, 16 bytes, with which a side proves that it has the key."""
        message = bytes([side]) + self.connects_nonce + self.accepts_nonce + self.greeting
        return _mac(self.key, self.purpose, message)

    def is_authentic(self, side: ConnectionSide, mac: bytes) -> bool:
        """Return whether `mac` is that of a side, in constant time."""
        return hmac.compare_digest(self.mac(side), mac)


class PartMacs:
    """The MACs of a connection's messages, in order: AES-GMAC with a key of the connection, 16 bytes.

    Both sides count messages, and the count is the nonce, so that a message can't be repeated or moved.
    """

    def __init__(self, proof: ConnectionProof) -> None:
        """Derive the key from a connection's nonces, which no other connection has."""
        message = proof.connects_nonce + proof.accepts_nonce + proof.greeting
        self._key = _mac(proof.key, _CODES, message)
        self._count = 0

    def begin(self, header: bytes | bytearray) -> PartMac:
        """Return the MAC of the next message, which begins with a header."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # noqa: PLC0415 - slow

        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        mac = PartMac(Cipher(algorithms.AES(self._key), modes.GCM(nonce)).encryptor())
        mac.update(header)
        return mac


class PartMac:
    """The MAC of one message, whose bytes come in pieces."""

    def __init__(self, context: AEADEncryptionContext) -> None:
        self._context = context

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Go on with these bytes, of at most a few megabytes: other threads wait meanwhile."""
        self._context.authenticate_additional_data(data)

    def end(self) -> bytes:
        """Return the MAC, once."""
        self._context.finalize()
        return self._context.tag


def _mac(key: bytes, purpose: bytes, message: bytes) -> bytes:
    if len(key) != SECRET_BYTES:
        raise ValueError(f"a key has {SECRET_BYTES} bytes, not {len(key)}")
    return blake2b(message, digest_size=MAC_BYTES, key=key, person=purpose).digest()
