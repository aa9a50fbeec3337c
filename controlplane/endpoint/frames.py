"""Frames to and from the stub, parsed and built. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address

from checkmate.job.schema import Stub
from checkmate.wire import tag
from controlplane.entities import mac_number, mac_text

WINDOW_SCALE = 7
MSS = 1460
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10

_IPV4, _ARP_TYPE, _TCP_PROTOCOL = 0x0800, 0x0806, 6
_DONT_FRAGMENT, _TTL = 0x4000, 64
_ARP_ETHERNET = (1, _IPV4, 6, 4)
"""Hardware and protocol types and lengths of ARP."""
_ARP_REQUEST, _ARP_REPLY = 1, 2
_MSS_OPTION = struct.pack("!BBH", 2, 4, MSS)
_WINDOW_SCALE_OPTION = bytes((1, 3, 3, WINDOW_SCALE))
"""The window scale option, after a NOP, so that options have whole words."""


class SegmentKind(Enum):
    """The kind of a frame to the stub."""

    ARP = "arp"
    SYN = "syn"
    DATA = "data"
    FIN = "fin"
    RST = "rst"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Segment:
    """The fields of a frame to the stub, named as in RFC 9293; for ARP only the addresses."""

    kind: SegmentKind
    mac: str
    ip: IPv4Address
    port: int = 0
    stub_port: int = 0
    sequence: int = 0
    acknowledgement: int = 0
    payload: bytes = b""
    window_scale: bool = False

    @property
    def length(self) -> int:
        """Length in sequence numbers: SYN and FIN count as one each."""
        return len(self.payload) + (self.kind in (SegmentKind.SYN, SegmentKind.FIN))


_ETHERNET = struct.Struct("!6s6sH")
_IP = struct.Struct("!BBHHHBBH4s4s")
_TCP = struct.Struct("!HHIIBBHHH")
_ARP = struct.Struct("!HHBBH6s4s6s4s")
_TCP_AT = _ETHERNET.size + _IP.size
_OPTIONS_AT = _TCP_AT + _TCP.size


def parse(frame: bytes) -> Segment | None:
    """Parse a punted frame; return `None` if it is neither an ARP request nor an IPv4 TCP segment."""
    if len(frame) < _ETHERNET.size:
        return None
    _, source_mac, ether_type = _ETHERNET.unpack_from(frame)
    if ether_type == _ARP_TYPE:
        return _parse_arp(frame)
    if ether_type != _IPV4 or len(frame) < _OPTIONS_AT or frame[_ETHERNET.size] != 0x45:
        return None
    _, _, total_length, _, _, _, protocol, _, source, _ = _IP.unpack_from(frame, _ETHERNET.size)
    if protocol != _TCP_PROTOCOL:
        return None
    sport, dport, sequence, acknowledgement, offset, flags, *_ = _TCP.unpack_from(frame, _TCP_AT)
    start, end = _TCP_AT + (offset >> 4) * 4, _ETHERNET.size + total_length
    if not _OPTIONS_AT <= start <= end <= len(frame):
        return None
    return Segment(
        _kind(flags, end > start),
        _mac(source_mac),
        IPv4Address(source),
        sport,
        dport,
        sequence,
        acknowledgement,
        frame[start:end],
        _has_window_scale(frame[_OPTIONS_AT:start]),
    )


def _parse_arp(frame: bytes) -> Segment | None:
    if len(frame) < _ETHERNET.size + _ARP.size:
        return None
    *kind, operation, mac, ip, _, _ = _ARP.unpack_from(frame, _ETHERNET.size)
    if tuple(kind) != _ARP_ETHERNET or operation != _ARP_REQUEST:
        return None
    return Segment(SegmentKind.ARP, _mac(mac), IPv4Address(ip))


def _kind(flags: int, payload: bool) -> SegmentKind:
    if flags & RST:
        return SegmentKind.RST
    if flags & SYN:
        return SegmentKind.OTHER if flags & ACK else SegmentKind.SYN
    if flags & FIN:
        return SegmentKind.FIN
    return SegmentKind.DATA if payload else SegmentKind.OTHER


def _mac(raw: bytes) -> str:
    return mac_text(int.from_bytes(raw, "big"))


def _has_window_scale(options: bytes) -> bool:
    at = 0
    while at < len(options) and options[at] != 0:
        if options[at] == 1:
            at += 1
            continue
        if options[at] == 3:
            return True
        if at + 1 >= len(options) or options[at + 1] < 2:
            return False
        at += options[at + 1]
    return False


def arp_reply(stub: Stub, request: Segment) -> bytes:
    """Return the ARP reply with the stub's hardware address."""
    asker, stub_mac = _mac_bytes(request.mac), _mac_bytes(stub.mac)
    return _ETHERNET.pack(asker, stub_mac, _ARP_TYPE) + _ARP.pack(
        *_ARP_ETHERNET, _ARP_REPLY, stub_mac, stub.ip.packed, asker, request.ip.packed
    )


def syn_ack(stub: Stub, syn: Segment) -> bytes:
    """Return a SYN-ACK with MSS and window scale, but neither SACK nor timestamps.

    The first data byte has sequence number 0 (design, section 4).
    """
    options = _MSS_OPTION + (_WINDOW_SCALE_OPTION if syn.window_scale else b"")
    ack = _after(syn.sequence, 1)
    return _segment(stub, syn, flags=SYN | ACK, seq=tag.STUB_ISN, ack=ack, window=65535, options=options)


def acknowledge(stub: Stub, hello: Segment) -> bytes:
    """Return the ACK by which the shadow node learns that its stream is connected."""
    ack = _after(hello.sequence, hello.length)
    return _segment(stub, hello, flags=ACK, seq=0, ack=ack, window=tag.COPY_WINDOW)


def finish(stub: Stub, fin: Segment) -> bytes:
    """Return the stub's own FIN, which acknowledges the shadow node's."""
    ack = _after(fin.sequence, fin.length)
    return _segment(stub, fin, flags=FIN | ACK, seq=fin.acknowledgement, ack=ack, window=65535)


def reset(stub: Stub, segment: Segment) -> bytes:
    """Return the RST that RFC 9293, section 3.10.7.1, requires for a segment without a connection."""
    if segment.kind is SegmentKind.SYN:
        ack = _after(segment.sequence, segment.length)
        return _segment(stub, segment, flags=RST | ACK, seq=0, ack=ack, window=0)
    return _segment(stub, segment, flags=RST, seq=segment.acknowledgement, ack=0, window=0)


def _after(sequence: int, length: int) -> int:
    return (sequence + length) % tag.MODULUS


def _mac_bytes(mac: str) -> bytes:
    return mac_number(mac).to_bytes(6, "big")


def _segment(
    stub: Stub, to: Segment, *, flags: int, seq: int, ack: int, window: int, options: bytes = b""
) -> bytes:
    length = _TCP.size + len(options)
    ends = stub.ip.packed + to.ip.packed
    ip = _IP.pack(0x45, 0, _IP.size + length, 0, _DONT_FRAGMENT, _TTL, _TCP_PROTOCOL, 0, ends[:4], ends[4:])
    tcp = _TCP.pack(to.stub_port, to.port, seq, ack, length << 2, flags, window, 0, 0) + options
    pseudo_header = ends + struct.pack("!HH", _TCP_PROTOCOL, length)
    return (
        _ETHERNET.pack(_mac_bytes(to.mac), _mac_bytes(stub.mac), _IPV4)
        + _with_checksum(ip, 10, ip)
        + _with_checksum(tcp, 16, pseudo_header + tcp)
    )


def _with_checksum(header: bytes, at: int, covered: bytes) -> bytes:
    """Return a header with the Internet checksum (RFC 1071) of `covered`, an even number of bytes."""
    # 2^16 is 1 modulo 0xFFFF, so the remainder of the whole number is the ones' complement sum of its words.
    checksum = -int.from_bytes(covered, "big") % 0xFFFF
    return header[:at] + checksum.to_bytes(2, "big") + header[at + 2 :]
