"""Frames to and from the stub: parsed by hand, and built with scapy. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address

from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import ARP, Ether

from checkmate.job.schema import Stub
from checkmate.wire import tag
from controlplane.entities import mac_text

WINDOW_SCALE = 7
MSS = 1460
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10


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


_ETHER_IP = struct.Struct("!6s6sHBBHHHBBH4s4s")
_TCP = struct.Struct("!HHIIBBHHH")
_ARP = struct.Struct("!6s6sHHHBBH6s4s6s4s")


def parse(frame: bytes) -> Segment | None:
    """Parse a punted frame; return `None` if it is neither ARP nor an IPv4 TCP segment.

    Parsed by hand because this runs for every frame of a flood; scapy takes a hundred times as long.
    """
    if len(frame) >= _ARP.size and frame[12:14] == b"\x08\x06":
        fields = _ARP.unpack_from(frame)
        return Segment(SegmentKind.ARP, _mac(fields[8]), IPv4Address(fields[9]))
    if len(frame) < _ETHER_IP.size + _TCP.size or frame[12:14] != b"\x08\x00" or frame[14] != 0x45:
        return None
    source_mac, total_length, protocol, source = (_ETHER_IP.unpack_from(frame)[i] for i in (1, 5, 9, 11))
    if protocol != 6:
        return None
    sport, dport, sequence, acknowledgement, offset, flags, *_ = _TCP.unpack_from(frame, _ETHER_IP.size)
    start, end = _ETHER_IP.size + (offset >> 4) * 4, 14 + total_length
    if not _ETHER_IP.size + _TCP.size <= start <= end <= len(frame):
        return None
    options = frame[_ETHER_IP.size + _TCP.size : start]
    return Segment(
        _kind(flags, end > start),
        _mac(source_mac),
        IPv4Address(source),
        sport,
        dport,
        sequence,
        acknowledgement,
        frame[start:end],
        _has_window_scale(options),
    )


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
    return bytes(
        Ether(dst=request.mac, src=stub.mac)
        / ARP(op=2, hwsrc=stub.mac, psrc=str(stub.ip), hwdst=request.mac, pdst=str(request.ip))
    )


def syn_ack(stub: Stub, syn: Segment) -> bytes:
    """Return a SYN-ACK with MSS and window scale, but neither SACK nor timestamps.

    The first data byte has sequence number 0 (design, section 4).
    """
    options: list[tuple[str, int]] = [("MSS", MSS)]
    if syn.window_scale:
        options.append(("WScale", WINDOW_SCALE))
    return _segment(
        stub, syn, flags="SA", seq=tag.STUB_ISN, ack=_after(syn.sequence, 1), window=65535, options=options
    )


def acknowledge(stub: Stub, hello: Segment) -> bytes:
    """Return the ACK by which the shadow node learns that its stream is connected."""
    ack = _after(hello.sequence, hello.length)
    return _segment(stub, hello, flags="A", seq=0, ack=ack, window=tag.COPY_WINDOW)


def finish(stub: Stub, fin: Segment) -> bytes:
    """Return the stub's own FIN, which acknowledges the shadow node's."""
    ack = _after(fin.sequence, fin.length)
    return _segment(stub, fin, flags="FA", seq=fin.acknowledgement, ack=ack, window=65535)


def reset(stub: Stub, segment: Segment) -> bytes:
    """Return the RST that RFC 9293, section 3.10.7.1, requires for a segment without a connection."""
    if segment.kind is SegmentKind.SYN:
        return _segment(
            stub, segment, flags="RA", seq=0, ack=_after(segment.sequence, segment.length), window=0
        )
    return _segment(stub, segment, flags="R", seq=segment.acknowledgement, ack=0, window=0)


def _after(sequence: int, length: int) -> int:
    return (sequence + length) % tag.MODULUS


def _segment(
    stub: Stub,
    to: Segment,
    *,
    flags: str,
    seq: int,
    ack: int,
    window: int,
    options: list[tuple[str, int]] | None = None,
) -> bytes:
    return bytes(
        Ether(dst=to.mac, src=stub.mac)
        / IP(src=str(stub.ip), dst=str(to.ip), ttl=64, flags="DF")
        / TCP(
            sport=to.stub_port,
            dport=to.port,
            flags=flags,
            seq=seq,
            ack=ack,
            window=window,
            options=options or [],
        )
    )
