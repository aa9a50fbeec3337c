"""Frames for the packet programs: Ethernet frames with ARP or TCP, whose fields can all be invalid."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from tests.softswitch.support.scenarios import CPU_PORT, LAST_SOURCE, STUB_IP, A, B, C, number

PORTS = (1, 2, 3, 7)
TAG = bytes.fromhex("fd10c4ec")
TIMESTAMPS = bytes.fromhex("0101080a 01234567 89abcdef")
MACS = [A, B, C, "02:00:00:00:00:0d", "ff:ff:ff:ff:ff:ff", "02:00:00:00:00:99"]
ADDRESSES = ["10.0.0.1", "10.0.0.2", "10.0.0.7", STUB_IP, LAST_SOURCE]


def ones_sum(data: bytes) -> int:
    """Return the 16-bit ones' complement sum (RFC 1071)."""
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(total)


@dataclass(frozen=True)
class Frame:
    """An Ethernet frame with ARP or TCP over IPv4, whose fields can all be invalid."""

    destination: str = B
    ether_type: int = 0x0800
    version_words: int = 0x45
    tos: int = 0x80
    total_length: int | None = None
    fragment: int = 0x4000
    protocol: int = 6
    addresses: tuple[str, str] = ("10.0.0.1", "10.0.0.2")
    options: bytes = b""
    data_offset: int | None = None
    flags: int = 0x010
    numbers: tuple[int, int, int, int] = (1000, 2000, 65535, 0)
    """Sequence, acknowledgement, window, urgent pointer."""
    arp: tuple[int, str] = (1, STUB_IP)
    payload: bytes = b"reduced gradients"
    damage: int = 0
    """Added to the correct TCP checksum."""
    length: int | None = field(default=None)

    def encode(self) -> bytes:
        ethernet = number(self.destination).to_bytes(6, "big") + number(A).to_bytes(6, "big")
        ethernet += self.ether_type.to_bytes(2, "big")
        body = self._arp() if self.ether_type == 0x0806 else self._ipv4()
        return (ethernet + body)[: self.length]

    def _arp(self) -> bytes:
        operation, target = self.arp
        sender = number(A).to_bytes(6, "big") + number("10.0.0.1").to_bytes(4, "big")
        return struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation) + sender + bytes(6) + _ip(target) + bytes(18)

    def _ipv4(self) -> bytes:
        segment = self._tcp()
        length = 20 + len(segment) if self.total_length is None else self.total_length
        start = struct.pack(
            "!BBHHHBB", self.version_words, self.tos, length, 0x1234, self.fragment, 64, self.protocol
        )
        source, destination = map(_ip, self.addresses)
        checksum = ~ones_sum(start + source + destination) & 0xFFFF
        return start + struct.pack("!H", checksum) + source + destination + segment

    def _tcp(self) -> bytes:
        offset = 5 + len(self.options) // 4 if self.data_offset is None else self.data_offset
        sequence, acknowledgement, window, urgent = self.numbers
        start = struct.pack(
            "!HHIIHH", 1000, 2000, sequence, acknowledgement, offset << 12 | self.flags, window
        )
        end = struct.pack("!H", urgent) + self.options + self.payload
        pseudo = b"".join(map(_ip, self.addresses)) + struct.pack("!HH", 6, len(start) + 2 + len(end))
        checksum = (~ones_sum(pseudo + start + b"\0\0" + end) + self.damage) & 0xFFFF
        return start + struct.pack("!H", checksum) + end


def _ip(address: str) -> bytes:
    return number(address).to_bytes(4, "big")


words = st.one_of(st.sampled_from([0, 1, 999, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]), st.integers(0, 2**32 - 1))
halves = st.one_of(st.sampled_from([0, 1, 0x7FFF, 0xFFFF]), st.integers(0, 0xFFFF))
tags = st.builds(
    lambda sequence, anchor, shadow, channel, incarnation: (
        TAG + struct.pack("!IIHBB", sequence, anchor, shadow, channel, incarnation)
    ),
    words,
    words,
    st.sampled_from([3, 3, 4, 5, 9]),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([7, 7, 8, 9]),
)
options = st.one_of(
    tags,
    tags.map(lambda option: TIMESTAMPS + option),
    tags.map(lambda option: b"\1" * 12 + option),
    tags.map(lambda option: option + TIMESTAMPS),
    st.sampled_from([b"", TIMESTAMPS, b"\1" * 16, TIMESTAMPS + b"\1" * 16, b"\1" * 40]),
)
addresses = st.tuples(st.sampled_from(["10.0.0.1", *ADDRESSES]), st.sampled_from(["10.0.0.2", *ADDRESSES]))
tagged = st.builds(
    Frame,
    destination=st.sampled_from(MACS),
    tos=st.sampled_from([0x80, 0x80, 0x83, 0xFC, 0, 0x7C]),
    addresses=addresses,
    options=options,
    flags=st.integers(0, 0xFFF),
    numbers=st.tuples(words, words, halves, halves),
    payload=st.binary(max_size=64),
    damage=st.sampled_from([0, 0, 1, 0xFFFF]),
)
"""Valid frames."""
other_frames = st.builds(
    lambda frame, changes: replace(frame, **changes),
    tagged,
    st.fixed_dictionaries(
        {},
        optional={
            "ether_type": st.sampled_from([0x0806, 0x86DD, 0x8100, 0]),
            "arp": st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([STUB_IP, "10.0.0.2"])),
            "version_words": st.sampled_from([0x44, 0x46, 0x4F, 0x55, 0]),
            "total_length": st.integers(0, 120),
            "fragment": st.sampled_from([0x2000, 1, 0x1FFF, 0x8000, 0xFFFF]),
            "protocol": st.sampled_from([17, 1, 0, 255]),
            "data_offset": st.integers(0, 15),
            "length": st.integers(0, 110),
        },
    ),
)
"""Frames with an invalid field."""
ports = st.sampled_from(PORTS)
arrivals = st.one_of(
    st.tuples(ports, tagged),
    st.tuples(ports, other_frames),
).map(lambda pair: (pair[0], pair[1].encode()))
packet_outs = st.tuples(
    st.just(CPU_PORT),
    st.builds(
        lambda port, frame, length: (port.to_bytes(2, "big") + frame.encode())[:length],
        st.sampled_from([*PORTS, CPU_PORT, 0, 0xFFFF]),
        tagged,
        st.sampled_from([None, None, 0, 1, 2]),
    ),
)

connected = st.builds(
    replace,
    tagged,
    addresses=st.just(("10.0.0.1", "10.0.0.2")),
    tos=st.sampled_from([0x80, 0x83]),
    options=st.builds(
        lambda before, sequence, anchor: before + TAG + struct.pack("!IIHBB", sequence, anchor, 3, 1, 7),
        st.sampled_from([b"", TIMESTAMPS]),
        words,
        words,
    ),
    payload=st.binary(min_size=1, max_size=200),
)
"""Segments of a connected stream."""
