"""The stream of a rank's part of a shard to a shadow node, with copies by hosts. Pure.

A rank connects, and both sides prove that they have the job's `gradients.key`:

1. The rank sends a greeting.
2. The node sends its version and a nonce.
3. The rank sends its MAC over greeting and nonce.
4. The node answers with the iteration at which the stream goes on, and its own MAC.

Then the node never writes again, because what a dead rank's kernel still has would be dropped if a byte of
the node came for it. The rank sends for each iteration a header, the part's bytes, and a MAC of both (design,
section 4; `keys.macs.PartMacs`). All numbers are big-endian.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final, NamedTuple

MAGIC: Final = 0xC4EC
VERSION: Final = 1
_GREETING: Final = struct.Struct(">HHHHHBxQ16s16s16s")
_CHALLENGE: Final = struct.Struct(">HH16s")
_ANSWER: Final = struct.Struct(">BqH16s")
_HEADER: Final = struct.Struct(">qQI")
GREETING_BYTES: Final = _GREETING.size
CHALLENGE_BYTES: Final = _CHALLENGE.size
ANSWER_BYTES: Final = _ANSWER.size
HEADER_BYTES: Final = _HEADER.size
_WAITED_MOST: Final = 2**32 - 1
PREFIX_BYTES: Final = 4
"""Bytes of a greeting that tell its version, whatever its length."""
TEXT_MAX: Final = 400
"""Characters of a node's reason, ASCII."""


KEPT_ITERATIONS, KEPT_BYTES, KEPT_SECONDS = 2, 64 << 20, 1.0
"""What a rank keeps of each stream for a slow node: whichever is most."""


def has_no_room(parts: int, nbytes: int, age: float) -> bool:
    """Return whether a rank leaves an iteration out, because its node is too far behind.

    Args:
        parts: iterations whose bytes the node's kernel has not acknowledged.
        nbytes: bytes of each.
        age: seconds for which the rank has had the oldest of them.
    """
    return parts >= KEPT_ITERATIONS and (parts + 1) * nbytes > KEPT_BYTES and age > KEPT_SECONDS


def kept_seconds(nbytes: int, period: float) -> float:
    """Return for how many seconds a rank keeps all parts, once it has one that a node does not take.

    `period`: seconds between iterations; 0 if unknown.
    """
    return max(KEPT_SECONDS, period * max(KEPT_ITERATIONS, KEPT_BYTES // max(1, nbytes)))


class PartsRefused(Exception):
    """The other side has another version, or refuses the stream; the message says why."""


def job_digest(job: str) -> bytes:
    """Return 16 bytes that identify a job by its name."""
    return blake2b(job.encode(), digest_size=16).digest()


class PartGreeting(NamedTuple):
    """The first message of a rank: whose part of what comes, and in which start of training."""

    group: int
    position: int
    shard: int
    incarnation: int
    nbytes: int
    """Bytes of the part in each iteration."""
    job: bytes
    """As `job_digest` returns."""
    start: bytes
    nonce: bytes

    def pack(self) -> bytes:
        """Return the message."""
        return _GREETING.pack(MAGIC, VERSION, *self)

    @classmethod
    def unpack(cls, data: bytes) -> PartGreeting:
        """Return the greeting of a message. Raise `PartsRefused` for another magic or version."""
        magic, version, *values = _GREETING.unpack(data)
        _check_version(magic, version, "rank")
        return cls(*values)


def is_of_checkmate(data: bytes) -> bool:
    """Return whether a message's first bytes are of Checkmate, in whatever version."""
    return data[:2] == MAGIC.to_bytes(2, "big")


def check_prefix(data: bytes) -> None:
    """Raise `PartsRefused` unless a greeting's first `PREFIX_BYTES` are of this version."""
    magic, version = struct.unpack(">HH", data)
    _check_version(magic, version, "rank")


def pack_challenge(nonce: bytes) -> bytes:
    """Return a node's first message."""
    return _CHALLENGE.pack(MAGIC, VERSION, nonce)


def unpack_challenge(data: bytes) -> bytes:
    """Return the nonce of a node's first message. Raise `PartsRefused` for another magic or version."""
    magic, version, nonce = _CHALLENGE.unpack(data)
    _check_version(magic, version, "shadow node")
    return bytes(nonce)


class NodeAnswer(NamedTuple):
    """The node's last message: the iteration at which the stream goes on, or why it is refused."""

    iteration: int
    reason: str
    mac: bytes

    def pack(self) -> bytes:
        """Return the message."""
        text = self.reason.encode("ascii", "replace")[:TEXT_MAX]
        return _ANSWER.pack(bool(text), self.iteration, len(text), self.mac) + text


def unpack_answer(data: bytes) -> tuple[int, int, bytes]:
    """Return iteration, length of the reason that follows, and MAC. Raise `PartsRefused` if it is none."""
    _, iteration, length, mac = _ANSWER.unpack(data)
    if length > TEXT_MAX:
        raise PartsRefused("it is not a shadow node of Checkmate")
    return iteration, length, bytes(mac)


class PartHeader(NamedTuple):
    """What comes before a part's bytes. `nbytes`: 0 if the iterations up to this one are left out."""

    iteration: int
    nbytes: int
    waited: float = 0.0
    """Seconds for which the rank had the part before it began to send it."""

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(self.iteration, self.nbytes, min(int(1000 * self.waited), _WAITED_MOST))

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> PartHeader:
        """Return the header of bytes."""
        iteration, nbytes, milliseconds = _HEADER.unpack(data)
        return cls(iteration, nbytes, milliseconds / 1000)


def _check_version(magic: int, version: int, peer: str) -> None:
    if magic != MAGIC:
        raise PartsRefused(f"it is not a {peer} of Checkmate")
    if version != VERSION:
        raise PartsRefused(
            f"the {peer} has version {version} of streams of gradients, and this side {VERSION}: install one "
            "version of Checkmate on all hosts"
        )
