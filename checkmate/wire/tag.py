"""The formats on the wire: the tag, the hello, and the arithmetic of a shadow stream.

This is the only description in Python; `tests/wire/test_tag.py` compares the P4 headers and the tagger's C
code with it. All fields are big-endian, all lengths in bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address

TAG_KIND = 253
"""TCP option kind: shared experimental (RFC 6994)."""
TAG_LENGTH = 16
TAG_EXID = 0xC4EC
DEFAULT_DSCP_BIT = 0x20
"""The DSCP bit of tagged segments, unless the job specifies another."""

HELLO_MAGIC = 0xC4EC0000
"""The upper half of a hello's first field; the lower half is its version."""
HELLO_VERSION = 2
HELLO_LENGTH = 40
HELLO_MAC_LENGTH = 16

STUB_ISN = 0xFFFFFFFF
"""Sequence number of the stub's SYN-ACK, so that the first data byte is number 0."""
COPY_WINDOW = 65535

MODULUS = 1 << 32
CHANNELS_MAX = 8
SHARDS_MAX = 256
"""Of a DP group. Shadow ids have 16 bits, because groups with the same addresses share them."""
NCCL_SHADOW_IDS = 16
"""Shadow ids, from 0 on, that the NCCL plugin has room for (`SHADOW_IDS_MAX` there)."""

_TAG = struct.Struct("!BBHIIHBB")
_HELLO = struct.Struct("!IIHHBBHQ")
_ENDS = struct.Struct("!4s4sHH")


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag option (design, section 2).

    `sequence` is the chunk's position in its stream; `anchor` is the corresponding TCP sequence number of the
    training connection.
    """

    sequence: int
    anchor: int
    shadow_id: int
    channel: int
    incarnation: int

    def pack(self) -> bytes:
        """Return the option's 16 bytes."""
        return _TAG.pack(
            TAG_KIND,
            TAG_LENGTH,
            TAG_EXID,
            self.sequence,
            self.anchor,
            self.shadow_id,
            self.channel,
            self.incarnation,
        )

    @classmethod
    def unpack(cls, option: bytes) -> Tag:
        """Parse 16 bytes. Raise `ValueError` if they are not a tag."""
        if len(option) != TAG_LENGTH:
            raise ValueError(f"a tag has {TAG_LENGTH} bytes, not {len(option)}")
        kind, length, exid, *fields = _TAG.unpack(option)
        if (kind, length, exid) != (TAG_KIND, TAG_LENGTH, TAG_EXID):
            raise ValueError(f"not a tag: kind {kind}, length {length}, ExID {exid:#06x}")
        return cls(*fields)


class OtherHelloVersion(ValueError):
    """A hello of another version. The message names the side that is old."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends of a stream's TCP connection: IPv4 addresses and ports."""

    shadow_ip: IPv4Address
    shadow_port: int
    stub_ip: IPv4Address
    stub_port: int

    def pack(self) -> bytes:
        """Return 12 bytes: both addresses, then both ports, the shadow node's first."""
        return _ENDS.pack(self.shadow_ip.packed, self.stub_ip.packed, self.shadow_port, self.stub_port)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a shadow node on a new stream (design, section 4).

    `base` is the position in the stream at which it joins, mod 2^32; `boundary` is its id within
    the job (`checkmate.job.boundaries`); `time` is in microseconds since the epoch, by the node's clock.
    """

    base: int
    boundary: int
    shadow_id: int
    channel: int
    incarnation: int
    time: int

    def covered(self, ends: Ends) -> bytes:
        """Return what the hello's MAC covers: its other fields, and the connection's ends."""
        return self._fields() + ends.pack()

    def pack(self, mac: bytes) -> bytes:
        """Return the hello's 40 bytes, to be sent in one segment. `mac`: 16 bytes."""
        return self._fields() + mac

    def _fields(self) -> bytes:
        return _HELLO.pack(
            HELLO_MAGIC | HELLO_VERSION,
            self.base,
            self.boundary,
            self.shadow_id,
            self.channel,
            self.incarnation,
            0,
            self.time,
        )

    @classmethod
    def unpack(cls, payload: bytes) -> tuple[Hello, bytes]:
        """Parse a segment's payload. Return the hello and its MAC, which is not checked.

        Raises:
            OtherHelloVersion: It is a hello of another version.
            ValueError: It is not exactly a hello.
        """
        first = int.from_bytes(payload[:4], "big")
        if len(payload) >= 4 and first & 0xFFFF0000 == HELLO_MAGIC and first != HELLO_MAGIC | HELLO_VERSION:
            version = first & 0xFFFF
            old = "the node" if version < HELLO_VERSION else "the controller"
            raise OtherHelloVersion(
                f"{old} is old: the node's hello has version {version}, the controller's {HELLO_VERSION}"
            )
        if len(payload) != HELLO_LENGTH:
            raise ValueError(f"a hello has {HELLO_LENGTH} bytes, not {len(payload)}")
        magic, base, boundary, shadow_id, channel, incarnation, zero, time = _HELLO.unpack_from(payload)
        if magic != HELLO_MAGIC | HELLO_VERSION:
            expected = HELLO_MAGIC | HELLO_VERSION
            raise ValueError(f"not a hello: it begins with {magic:#010x}, not {expected:#010x}")
        if zero:
            raise ValueError(f"not a hello: its bytes 14 and 15 are {zero:#06x}, not zero")
        return cls(base, boundary, shadow_id, channel, incarnation, time), payload[_HELLO.size :]


def copy_acknowledgement(shadow_isn: int) -> int:
    """Return the acknowledgement number of all copies, which covers the SYN and the hello."""
    return (shadow_isn + 1 + HELLO_LENGTH) % MODULUS


def minus(base: int) -> int:
    """Return -base mod 2^32 for a `streams` entry, because Tofino can add action data but not subtract it."""
    return -base % MODULUS
