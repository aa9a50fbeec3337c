"""The exchange of two ranks before the first gradient: a greeting, and proofs that both have the ring's key.

The side that connects sends its greeting and a nonce. The other answers with its own version, a nonce and a
MAC over both nonces and the greeting. The first answers with its own MAC, and the other ends with one byte.
No byte of it is tagged. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from checkmate.keys.macs import MAC_BYTES, NONCE_BYTES

MAGIC: Final = 0xC4EC
VERSION: Final = 3
"""Version of greetings and of the order of bytes on the ring. Version 2 had no proofs."""
OTHER_KEY: Final = "has another ring.key: copy the folder of role trainer to all hosts of ranks"
ACCEPTANCE: Final = b"\x01"

_HEADER: Final = struct.Struct("!HH")
_GREETING: Final = struct.Struct("!HHHHBB16s")
_FIELDS: Final = (
    "magic",
    "version",
    "number of ranks",
    "rank",
    "channel",
    "incarnation",
    "fingerprint of the buckets",
)

HEADER_BYTES: Final = _HEADER.size
GREETING_BYTES: Final = _GREETING.size
OPENING_BYTES: Final = GREETING_BYTES + NONCE_BYTES
ANSWER_BYTES: Final = HEADER_BYTES + NONCE_BYTES + MAC_BYTES
FINGERPRINT_BYTES: Final = 16


@dataclass(frozen=True)
class Greeting:
    """The first bytes on a connection: who connects, and to which ring."""

    ranks: int
    rank: int
    channel: int
    incarnation: int
    fingerprint: bytes
    """16 bytes, over everything that ranks must have in common."""

    def pack(self) -> bytes:
        """Return its bytes."""
        fields = (self.ranks, self.rank, self.channel, self.incarnation, self.fingerprint)
        return _GREETING.pack(MAGIC, VERSION, *fields)

    def fault(self, greeting: bytes) -> str | None:
        """Return in which way a received greeting differs from this one, or `None` if it is equal."""
        for name, peers, expected in zip(
            _FIELDS, _GREETING.unpack(greeting), _GREETING.unpack(self.pack()), strict=True
        ):
            if peers != expected:
                words = [value.hex() if isinstance(value, bytes) else value for value in (peers, expected)]
                return f"connected with {name} {words[0]}, not {words[1]}"
        return None


def header() -> bytes:
    """Return the first bytes of an answer, which every version can read."""
    return _HEADER.pack(MAGIC, VERSION)


def version_fault(start: bytes | bytearray) -> str | None:
    """Return which side is old, from the first `HEADER_BYTES` of the other; `None` if versions are equal."""
    magic, version = _HEADER.unpack(start[:HEADER_BYTES])
    if magic != MAGIC:
        return "is not a rank of Checkmate"
    if version == VERSION:
        return None
    age = "an older" if version < VERSION else "a newer"
    return f"has {age} version of Checkmate (of the ring: {version}, here {VERSION}); all ranks need the same"
