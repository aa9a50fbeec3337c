"""Transport checksums that a sending kernel left incomplete (CHECKSUM_PARTIAL), at the output of the switch.

Such a frame has only its pseudo header's sum. It is either prepared for the next kernel
(virtio-net header, virtio specification 5.1.6.2) or completed in software (RFC 1071).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

VLAN_TYPES = (0x8100, 0x88A8)
IPV4 = 0x0800
IPV6 = 0x86DD
TCP = 6
UDP = 17
# IPv6 extension headers before TCP or UDP: hop-by-hop, routing, destination options.
IPV6_EXTENSIONS = (0, 43, 60)

TCP_CHECKSUM = 16
UDP_CHECKSUM = 6
UDP_HEADER = 8

NEEDS_CHECKSUM = 1
GSO_TCPV4 = 1
GSO_TCPV6 = 4
GSO_UDP_L4 = 5
GSO_ECN = 0x80
CWR = 0x80

VIRTIO_HEADER = struct.Struct("=BBHHHH")
"""flags, gso_type, hdr_len, gso_size, csum_start, csum_offset"""
NO_OFFLOAD = bytes(VIRTIO_HEADER.size)


@dataclass(slots=True)
class Offload:
    """Work that the sending kernel has deferred: a checksum, and possibly segmentation. Lengths are in bytes.

    Attributes:
        frame: The frame as received.
        header: The virtio-net header with which this same frame may be sent; empty if it may not.
        start: Offset of the transport header.
        offset: Offset of the checksum in the transport header.
        gso_type: As in virtio.
        gso_size: As in virtio; 0 for one segment.
    """

    frame: bytes
    header: bytes
    start: int
    offset: int
    gso_type: int
    gso_size: int

    def payload_length(self) -> int:
        """Return the number of bytes after the TCP or UDP header of `frame`."""
        if self.offset == TCP_CHECKSUM:
            return len(self.frame) - self.start - (self.frame[self.start + 12] >> 4) * 4
        return len(self.frame) - self.start - UDP_HEADER

    def segments(self) -> int:
        """Return the number of frames on a wire for this frame."""
        return -(-self.payload_length() // self.gso_size) if self.gso_size else 1


@dataclass(slots=True)
class Transport:
    """Location of a frame's TCP or UDP segment; `pseudo` is its pseudo header's sum, not folded."""

    version: int
    protocol: int
    start: int
    end: int
    pseudo: int

    @property
    def checksum(self) -> int:
        """The checksum's offset in the frame."""
        return self.start + (TCP_CHECKSUM if self.protocol == TCP else UDP_CHECKSUM)


def locate(frame: bytes) -> Transport | None:
    """Locate a frame's TCP or UDP segment, after VLAN tags and IPv6 extension headers.

    Returns `None` if there is none, if a length is inconsistent, or if the packet is a fragment.
    """
    size = len(frame)
    at = 12
    while size >= at + 4 and int.from_bytes(frame[at : at + 2]) in VLAN_TYPES:
        at += 4
    kind = int.from_bytes(frame[at : at + 2])
    at += 2
    if kind == IPV4:
        segment = _ipv4(frame, at)
    elif kind == IPV6:
        segment = _ipv6(frame, at)
    else:
        return None
    if segment is None or segment.end > size:
        return None
    header = 20 if segment.protocol == TCP else UDP_HEADER
    return segment if segment.end - segment.start >= header else None


def _ipv4(frame: bytes, at: int) -> Transport | None:
    if len(frame) < at + 20:
        return None
    header = (frame[at] & 15) * 4
    protocol = frame[at + 9]
    # more fragments, or an offset
    if frame[at] >> 4 != 4 or header < 20 or frame[at + 6] & 0x3F or frame[at + 7]:
        return None
    if protocol not in (TCP, UDP):
        return None
    length = int.from_bytes(frame[at + 2 : at + 4]) - header
    pseudo = int.from_bytes(frame[at + 12 : at + 20]) % 0xFFFF + protocol + length
    return Transport(4, protocol, at + header, at + header + length, pseudo)


def _ipv6(frame: bytes, at: int) -> Transport | None:
    if len(frame) < at + 40 or frame[at] >> 4 != 6:
        return None
    end = at + 40 + int.from_bytes(frame[at + 4 : at + 6])
    addresses = int.from_bytes(frame[at + 8 : at + 40]) % 0xFFFF
    protocol = frame[at + 6]
    at += 40
    while protocol in IPV6_EXTENSIONS and len(frame) >= at + 8:
        protocol, words = frame[at], frame[at + 1]
        at += 8 + words * 8
    if protocol not in (TCP, UDP):
        return None
    return Transport(6, protocol, at, end, addresses + protocol + end - at)


def fold(total: int) -> int:
    """Return a ones' complement sum in 16 bits; it is 0 only if all words are 0."""
    return total % 0xFFFF or (0xFFFF if total else 0)


def add(data: bytes) -> int:
    """Return the sum of big-endian 16-bit words, the last one padded with zeros; not folded."""
    even = len(data) & ~1
    total = int(np.frombuffer(data, dtype=">u2", count=even >> 1).sum(dtype=np.uint64))
    return total + (data[-1] << 8 if len(data) & 1 else 0)


def complete(frame: bytes) -> bytes | None:
    """Return the frame with its TCP or UDP checksum computed; `None` if it has neither."""
    where = locate(frame)
    if where is None:
        return None
    at = where.checksum
    total = where.pseudo + add(frame[where.start : at]) + add(frame[at + 2 : where.end])
    value = 0xFFFF - fold(total)
    if where.protocol == UDP and value == 0:
        value = 0xFFFF
    return b"".join((frame[:at], value.to_bytes(2), frame[at + 2 :]))


Parts = tuple[bytes | memoryview, ...]


def defer(frame: bytes, offload: Offload) -> Parts | None:
    """Return the bytes for a socket with PACKET_VNET_HDR, by which the next kernel completes the frame.

    The checksum field gets the pseudo header's sum, even if a program has written to it. The result is `None`
    if the frame no longer has the same TCP or UDP payload, as after an encapsulation, because the inner
    checksum would stay incomplete.
    """
    if offload.header and frame == offload.frame:
        return offload.header, frame
    where = locate(frame)
    if where is None:
        return None
    start = where.start
    header = (frame[start + 12] >> 4) * 4 if where.protocol == TCP else UDP_HEADER
    payload = len(frame) - start - header
    if payload != offload.payload_length():
        return None
    gso_type = gso_size = 0
    if offload.gso_size and payload > offload.gso_size:
        gso_size = offload.gso_size
        gso_type = _gso_type(where, offload.gso_type, frame[start + 13])
        if not gso_type:
            return None
    at = where.checksum
    virtio = VIRTIO_HEADER.pack(NEEDS_CHECKSUM, gso_type, start + header, gso_size, start, at - start)
    pseudo = fold(where.pseudo).to_bytes(2)
    if frame[at : at + 2] == pseudo:
        return virtio, frame
    view = memoryview(frame)
    return virtio, view[:at], pseudo, view[at + 2 :]


def _gso_type(where: Transport, before: int, flags: int) -> int:
    if before & ~GSO_ECN == GSO_UDP_L4:
        return GSO_UDP_L4 if where.protocol == UDP else 0
    if where.protocol != TCP:
        return 0
    ecn = GSO_ECN if before & GSO_ECN and flags & CWR else 0
    return (GSO_TCPV4 if where.version == 4 else GSO_TCPV6) | ecn
