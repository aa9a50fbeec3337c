"""Sent and expected packets, in scapy, independent of the P4 program.

`tagged_segment` writes the TCP options byte by byte. `expected_copy` builds the shadow copy field by field,
and scapy computes its checksums.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address

from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from checkmate.job.schema import Stub
from controlplane.streams import StreamConnection, StreamKey

TRAINER_PORT, PEER_PORT = 1, 2
SHADOW_PORTS = tuple(range(3, 19))
PORTS = (TRAINER_PORT, PEER_PORT, *SHADOW_PORTS)
"""The switch's ports: a boundary rank, the next rank, and sixteen shadow NICs."""

TRAINER_IP, PEER_IP = IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2")
TRAINER_MAC, PEER_MAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
STUB = Stub(ip=IPv4Address("10.0.255.1"), mac="02:00:00:00:ff:01", port=7010)
DSCP_BIT = 0x20
BOUNDARY = 300
BROADCAST = "ff:ff:ff:ff:ff:ff"


def tag(
    sequence: int = 0, anchor: int = 0, shadow_id: int = 0, channel: int = 0, incarnation: int = 1
) -> bytes:
    """Return the tag option (design, section 2)."""
    return (
        bytes([253, 16, 0xC4, 0xEC])
        + sequence.to_bytes(4, "big")
        + anchor.to_bytes(4, "big")
        + shadow_id.to_bytes(2, "big")
        + bytes([channel, incarnation])
    )


TIMESTAMPS = bytes([1, 1, 8, 10]) + bytes.fromhex("12345678 9abcdef0")
"""NOP, NOP, timestamps (RFC 7323, appendix A)."""
SACK = bytes([1, 1, 5, 10]) + bytes.fromhex("00001000 00002000")
"""NOP, NOP, SACK with one block (RFC 2018)."""


@dataclass(frozen=True)
class TaggedSegment:
    """A segment of the training connection, from the boundary rank."""

    options: bytes = b""
    payload: bytes = b"gradient"
    sequence: int = 1_000_000
    acknowledgement: int = 2_000_000
    flags: str = "A"
    window: int = 4321
    urgent_pointer: int = 0
    reserved: int = 0
    dscp: int = DSCP_BIT
    ecn: int = 0
    ttl: int = 64
    identification: int = 0x1234
    ip_flags: str = "DF"
    source: IPv4Address = TRAINER_IP
    destination: IPv4Address = PEER_IP
    source_port: int = 40000
    destination_port: int = 50000
    destination_mac: str = PEER_MAC
    data_offset: int | None = None
    """In words; correct by default."""

    def packet(self) -> Ether:
        """Return it in scapy; after changes, checksums must be computed again."""
        offset = 5 + len(self.options) // 4 if self.data_offset is None else self.data_offset
        return (
            Ether(dst=self.destination_mac, src=TRAINER_MAC)
            / IP(
                src=str(self.source),
                dst=str(self.destination),
                tos=self.dscp << 2 | self.ecn,
                ttl=self.ttl,
                id=self.identification,
                flags=self.ip_flags,
                proto=6,
            )
            / TCP(
                sport=self.source_port,
                dport=self.destination_port,
                seq=self.sequence,
                ack=self.acknowledgement,
                dataofs=offset,
                reserved=self.reserved,
                flags=self.flags,
                window=self.window,
                urgptr=self.urgent_pointer,
            )
            / Raw(self.options + self.payload)
        )

    def frame(self) -> bytes:
        return bytes(self.packet())


def tagged_segment(option: bytes, *, timestamps: bool = False, **fields: object) -> TaggedSegment:
    """Return a segment whose options are exactly the tag, or timestamps and the tag."""
    return replace(TaggedSegment(), options=(TIMESTAMPS if timestamps else b"") + option, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shadow:
    """A shadow node's end of a stream, and the switch port of its NIC."""

    number: int
    isn: int = 0x8000_0000
    base: int = 0

    @property
    def switch_port(self) -> int:
        return SHADOW_PORTS[self.number]

    @property
    def ip(self) -> IPv4Address:
        return IPv4Address("10.0.1.0") + self.number

    @property
    def mac(self) -> str:
        return f"02:00:00:01:00:{self.number:02x}"

    @property
    def tcp_port(self) -> int:
        return 33000 + self.number

    def connection(self) -> StreamConnection:
        """Return the controller's view of it."""
        return StreamConnection(self.ip, self.mac, self.tcp_port, self.isn, self.base)


def expected_copy(segment: TaggedSegment, shadow: Shadow, sequence: int) -> bytes:
    """Return the shadow copy of a tagged segment, at `sequence` of the stream (design, section 4)."""
    return bytes(copy_packet(segment, shadow, sequence))


def copy_packet(segment: TaggedSegment, shadow: Shadow, sequence: int) -> Ether:
    """Return `expected_copy` in scapy, before checksums are computed."""
    return (
        Ether(dst=shadow.mac, src=STUB.mac)
        / IP(
            src=str(STUB.ip),
            dst=str(shadow.ip),
            tos=segment.dscp << 2 | segment.ecn,
            ttl=segment.ttl,
            id=segment.identification,
            flags=segment.ip_flags,
            proto=6,
        )
        / TCP(
            sport=STUB.port,
            dport=shadow.tcp_port,
            seq=sequence,
            ack=(shadow.isn + 41) % 2**32,
            dataofs=5,
            flags="PA" if "P" in segment.flags else "A",
            window=65535,
            urgptr=0,
        )
        / Raw(segment.payload)
    )


def stream_key(shadow_id: int = 0, channel: int = 0, holder: int = 1) -> StreamKey:
    """Return a stream of the tests' only boundary."""
    return (BOUNDARY, channel, shadow_id, holder)


def payload(length: int, seed: int = 1) -> bytes:
    """Return bytes that differ between positions."""
    return bytes((seed + i * 7 + (i >> 8)) % 256 for i in range(length))


def describe(frame: bytes) -> str:
    """Return a frame field by field, and as hexadecimal digits (the first 128 bytes)."""
    fields = str(Ether(frame).show(dump=True))
    return f"{fields}{len(frame)} bytes: {frame[:128].hex(' ', 2)}\n"


def compare(expected: Sequence[bytes], actual: Sequence[bytes]) -> str:
    """Return the differences between frames, field by field; empty if they are equal."""
    if list(expected) == list(actual):
        return ""
    lines = [f"{len(expected)} frames expected, {len(actual)} received"]
    for place in range(max(len(expected), len(actual))):
        want = describe(expected[place]) if place < len(expected) else ""
        have = describe(actual[place]) if place < len(actual) else ""
        if want != have:
            diff = difflib.unified_diff(
                want.splitlines(), have.splitlines(), "expected", "received", lineterm="", n=1
            )
            lines += [f"frame {place}:", *diff]
    return "\n".join(lines[:80])
