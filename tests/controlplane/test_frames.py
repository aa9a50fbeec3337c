"""Frames of the stub: what is built, as scapy reads it; and any bytes, which the parser must survive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet

from checkmate.job.schema import Stub
from controlplane.endpoint import frames
from controlplane.endpoint.endpoint import answer
from controlplane.endpoint.frames import Segment, SegmentKind
from controlplane.network import Network
from testbed.jobs import job
from tests.support.controlplane.endpoint import empty_view
from tests.support.fuzz import fuzz

JOB = job(channels=1, ranks=2, nodes=1, replicas=1)
NETWORK = Network([JOB])
STUB = NETWORK.switches["tor0"].stub
NIC = JOB.shadow_nodes[0].nics[0]
VIEW = empty_view(JOB)

PORTS = st.integers(0, 0xFFFF)
NUMBERS = st.integers(0, 0xFFFFFFFF)
MACS = st.binary(min_size=6, max_size=6).map(lambda raw: raw.hex(":"))
SEGMENTS = st.builds(
    Segment,
    kind=st.sampled_from(SegmentKind),
    mac=MACS,
    ip=st.ip_addresses(v=4),
    port=PORTS,
    stub_port=PORTS,
    sequence=NUMBERS,
    acknowledgement=NUMBERS,
    payload=st.binary(max_size=60),
    window_scale=st.booleans(),
)
STUBS = st.builds(lambda ip, mac, port: Stub(ip=ip, mac=mac, port=port), st.ip_addresses(v=4), MACS, PORTS)
BUILDERS = [frames.syn_ack, frames.acknowledge, frames.finish, frames.reset]


def by_scapy(frame: bytes) -> Packet:
    """Return the same headers, with lengths and checksums that scapy has computed."""
    packet = Ether(frame)
    del packet[IP].chksum, packet[IP].len, packet[TCP].chksum, packet[TCP].dataofs
    return packet


@pytest.mark.parametrize("build", BUILDERS)
@given(stub=STUBS, segment=SEGMENTS)
@settings(max_examples=40)
def test_lengths_and_checksums_are_scapys(
    build: Callable[[Stub, Segment], bytes], stub: Stub, segment: Segment
) -> None:
    frame = build(stub, segment)
    assert bytes(by_scapy(frame)) == frame
    packet = Ether(frame)
    assert (packet.dst, packet.src) == (segment.mac, stub.mac)
    assert (packet[IP].src, packet[IP].dst) == (str(stub.ip), str(segment.ip))
    assert (packet[IP].ttl, str(packet[IP].flags)) == (64, "DF")
    assert (packet[TCP].sport, packet[TCP].dport) == (segment.stub_port, segment.port)


@given(stub=STUBS, request=SEGMENTS)
def test_an_arp_reply_is_scapys(stub: Stub, request: Segment) -> None:
    mac, ip = request.mac, str(request.ip)
    reply = ARP(op=2, hwsrc=stub.mac, psrc=str(stub.ip), hwdst=mac, pdst=ip)
    assert frames.arp_reply(stub, request) == bytes(Ether(dst=mac, src=stub.mac) / reply)


def tcp_frame(flags: str, payload: bytes = b"", **fields: object) -> bytes:
    tcp = TCP(sport=5000, dport=STUB.port, flags=flags, seq=7, **fields)
    return bytes(Ether(src=NIC.mac, dst=STUB.mac) / IP(src=str(NIC.ip), dst=str(STUB.ip)) / tcp / payload)


def arp_frame(**fields: object) -> bytes:
    request = {"op": 1, "hwsrc": NIC.mac, "psrc": str(NIC.ip), "pdst": str(STUB.ip), **fields}
    return bytes(Ether(src=NIC.mac, dst="ff:ff:ff:ff:ff:ff") / ARP(**request))


OPTIONS = [("MSS", 1460), ("SAckOK", b""), ("Timestamp", (1, 0)), ("NOP", None), ("WScale", 9)]
WHOLE = [
    tcp_frame("S", options=OPTIONS),
    tcp_frame("PA", b"hello"),
    tcp_frame("FA"),
    tcp_frame("R"),
    arp_frame(),
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return a frame of the kinds above with some bytes changed, cut off or added."""
    frame = bytearray(draw(st.sampled_from(WHOLE)))
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, len(frame) - 1), st.integers(0, 255)), max_size=8)
    ):
        frame[at] = value
    return bytes(frame[: draw(st.integers(0, len(frame)))]) + draw(st.binary(max_size=30))


def survives(frame: bytes) -> None:
    """Check that a frame has an answer or none, and that the answer is a frame."""
    segment = frames.parse(frame)
    if segment is not None:
        reply = answer(segment, NIC.port, VIEW, 0).frame
        if reply is not None and segment.kind is not SegmentKind.ARP:
            assert bytes(by_scapy(reply)) == reply


@fuzz(1_000, frame=st.one_of(st.binary(max_size=200), damaged()))
def test_no_frame_upsets_the_parser(frame: bytes) -> None:
    survives(frame)


def test_every_cut_and_every_value_of_every_byte() -> None:
    for whole in WHOLE:
        for at in range(len(whole)):
            survives(whole[:at])
            for value in range(0, 256, 15):
                survives(whole[:at] + bytes([value]) + whole[at + 1 :])


@pytest.mark.parametrize("fields", [{"op": 2}, {"hwtype": 6}, {"ptype": 0x86DD}, {"hwlen": 8}, {"plen": 16}])
def test_only_arp_requests_for_ipv4_over_ethernet_are_answered(fields: dict[str, int]) -> None:
    assert frames.parse(arp_frame()) is not None
    assert frames.parse(arp_frame(**fields) + bytes(40)) is None
