"""Checksums through the switch, and network interfaces as ports."""

from __future__ import annotations

import socket
import struct
import subprocess
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from softswitch.frames.afpacket import ETH_P_ALL, LinkWatch, PacketPort
from softswitch.frames.checksums import (
    GSO_ECN,
    GSO_TCPV4,
    GSO_TCPV6,
    VIRTIO_HEADER,
    Offload,
    complete,
    defer,
    locate,
)
from tests.softswitch.support.client import needs_root, sh, wait_for
from tests.softswitch.support.memory_port import MemoryPort


def frame(network: Packet, transport: Packet, payload: bytes, tags: int = 0) -> bytes:
    """Return a frame with scapy's correct checksums."""
    packet = Ether(dst="02:00:00:00:00:01", src="02:00:00:00:00:02")
    for tag in range(tags):
        packet = packet / Dot1Q(vlan=10 + tag)
    return bytes(packet / network / transport / Raw(payload))


NETWORKS = (IP(src="10.0.0.1", dst="10.0.0.2"), IPv6(src="fd00::1", dst="fd00::2"))
TRANSPORTS = (TCP(sport=1, dport=2, flags="PA", options=[("Timestamp", (1, 2))]), UDP(sport=1, dport=2))


def blank(whole: bytes) -> bytes:
    """Return the frame as its sender leaves it: with the pseudo header's sum as its checksum."""
    where = locate(whole)
    assert where is not None
    partial = (where.pseudo % 0xFFFF).to_bytes(2)
    return whole[: where.checksum] + partial + whole[where.checksum + 2 :]


def offload(frame_: bytes, gso_type: int = 0, gso_size: int = 0) -> Offload:
    where = locate(frame_)
    assert where is not None
    return Offload(frame_, b"\1" + bytes(9), where.start, where.checksum - where.start, gso_type, gso_size)


@given(
    network=st.sampled_from((*NETWORKS, NETWORKS[1] / IPv6ExtHdrDestOpt())),
    transport=st.sampled_from(TRANSPORTS),
    payload=st.binary(max_size=99),
    tags=st.integers(0, 2),
)
def test_completed_checksum_is_scapys(network: Packet, transport: Packet, payload: bytes, tags: int) -> None:
    whole = frame(network, transport, payload, tags)
    assert complete(blank(whole)) == whole


def test_completed_udp_checksum_is_never_zero() -> None:
    """RFC 768: a computed zero is sent as all ones."""
    # A payload equal to the checksum with a zero payload makes the sum all ones.
    payload = frame(NETWORKS[0], UDP(sport=1, dport=2), bytes(2))[40:42]
    whole = frame(NETWORKS[0], UDP(sport=1, dport=2), payload)
    assert whole[40:42] == b"\xff\xff"
    assert complete(blank(whole)) == whole


@pytest.mark.parametrize(
    "other_frame",
    [
        b"",
        b"\0" * 13,
        frame(NETWORKS[0], TCP(), b"")[:30],
        frame(NETWORKS[0], TCP(), b"")[:-1],
        frame(IP(flags="MF"), UDP(), b"x"),
        frame(IP(frag=1), UDP(), b"x"),
        bytes(Ether() / Raw(b"x" * 60)),
        frame(IP(proto=47), Raw(b"y" * 30), b""),
    ],
)
def test_no_segment_to_complete(other_frame: bytes) -> None:
    assert locate(other_frame) is None
    assert complete(other_frame) is None


def virtio(parts: tuple[bytes | memoryview, ...]) -> tuple[int, ...]:
    return VIRTIO_HEADER.unpack(parts[0])


def test_unchanged_frame_leaves_with_its_own_header() -> None:
    segment = blank(frame(NETWORKS[0], TRANSPORTS[0], b"x" * 5000))
    work = offload(segment, GSO_TCPV4, 1000)
    assert defer(segment, work) == (work.header, segment)


@pytest.mark.parametrize(("network", "gso_type"), [(NETWORKS[0], GSO_TCPV4), (NETWORKS[1], GSO_TCPV6)])
def test_rewritten_frame_gets_its_own_pseudo_header(network: Packet, gso_type: int) -> None:
    work = offload(blank(frame(network, TRANSPORTS[0], b"x" * 5000)), GSO_TCPV4 | GSO_ECN, 1000)
    copy = frame(network, TCP(sport=7, dport=8, flags="A"), b"x" * 5000, tags=1)
    parts = defer(copy, work)
    assert parts is not None
    where = locate(copy)
    assert where is not None
    # The ECN bit goes with the CWR flag, which this copy lacks.
    assert virtio(parts) == (1, gso_type, where.start + 20, 1000, where.start, 16)
    assert complete(b"".join(parts[1:])) == copy
    assert b"".join(parts[1:]) == blank(copy)
    with_cwr = defer(frame(network, TCP(flags="AC"), b"x" * 5000), work)
    assert with_cwr is not None
    assert virtio(with_cwr)[1] == gso_type | GSO_ECN


def test_one_segment_leaves_without_gso() -> None:
    work = offload(blank(frame(NETWORKS[0], TRANSPORTS[0], b"x" * 1000)), GSO_TCPV4, 1000)
    parts = defer(frame(NETWORKS[0], TCP(flags="A"), b"x" * 1000), work)
    assert parts is not None
    assert virtio(parts) == (1, 0, 54, 0, 34, 16)


def test_segments_are_counted_as_on_a_wire() -> None:
    assert offload(frame(NETWORKS[0], TRANSPORTS[0], b"x" * 5001), GSO_TCPV4, 1000).segments() == 6
    assert offload(frame(NETWORKS[0], TRANSPORTS[1], b"x" * 5000), 5, 1000).segments() == 5
    assert offload(frame(NETWORKS[0], TRANSPORTS[0], b"")).segments() == 1


@pytest.mark.parametrize(
    "copy",
    [
        bytes(Ether() / IP() / UDP(sport=4789, dport=4789) / Raw(b"y" * 80)),
        frame(NETWORKS[0], TRANSPORTS[0], b"x" * 99),
        bytes(Ether() / Raw(b"x" * 100)),
    ],
)
def test_frame_with_another_payload_cannot_leave(copy: bytes) -> None:
    assert defer(copy, offload(blank(frame(NETWORKS[0], TRANSPORTS[0], b"x" * 100)))) is None


def test_memory_port_sends_completed_checksums() -> None:
    whole = frame(NETWORKS[0], TRANSPORTS[0], b"x" * 5000)
    port = MemoryPort(1)
    assert port.send(blank(whole), offload(blank(whole), GSO_TCPV4, 1000))
    assert list(port.output) == [whole]
    assert (port.stats.tx_packets, port.stats.tx_segments) == (1, 5)
    port.close()


@pytest.fixture
def pair() -> Iterator[tuple[str, str]]:
    """Yield two connected interfaces."""
    stem = f"sp{time.monotonic_ns() % 10**9}"
    names = f"{stem}a", f"{stem}b"
    sh(f"ip link add {names[0]} type veth peer name {names[1]}")
    for name in names:
        sh(f"sysctl -qw net.ipv6.conf.{name}.disable_ipv6=1 && ip link set {name} mtu 9000 up")
    yield names
    subprocess.run(["ip", "link", "del", names[0]], check=False, capture_output=True)


def receive(port: PacketPort) -> list[tuple[bytes, Offload | None]]:
    """Return all frames that arrive within a short time."""
    frames: list[tuple[bytes, Offload | None]] = []
    time.sleep(0.05)
    port.poll(lambda number, data, work: frames.append((data, work)), 100)
    return frames


FRAMES = [
    bytes(Ether(dst="ff:ff:ff:ff:ff:ff") / Raw(b"broadcast" * 6)),
    bytes(Ether(dst="02:00:00:00:00:07") / Raw(b"to another" * 6)),
    bytes(Ether(dst="02:00:00:00:00:07") / Dot1Q(vlan=5, prio=6) / IP() / UDP() / Raw(b"x" * 40)),
    bytes(Ether(dst="02:00:00:00:00:07", type=0x88A8) / Dot1Q(vlan=5) / Dot1Q(vlan=9) / IP() / UDP()),
    bytes(Ether(dst="02:00:00:00:00:07") / IP() / UDP() / Raw(b"y" * (9014 - 42))),
    bytes(Ether(dst="02:00:00:00:00:07") / Dot1Q(vlan=8) / IP() / UDP() / Raw(b"y" * (9018 - 46))),
    bytes(Ether(dst="02:00:00:00:00:07") / Raw(b"")),
]


@needs_root
def test_frames_pass_byte_for_byte(pair: tuple[str, str]) -> None:
    """Broadcast, foreign addresses, VLAN tags, 9,000 bytes, 14 bytes; sent frames are not received."""
    near, far = PacketPort(1, pair[0]), PacketPort(2, pair[1])
    for data_ in FRAMES:
        assert near.send(data_, None)
    assert near.stats.tx_packets == len(FRAMES), near.stats
    assert [data for data, _ in receive(far)] == FRAMES
    assert receive(near) == []
    assert (far.stats.rx_packets, far.stats.rx_bytes) == (len(FRAMES), sum(map(len, FRAMES)))
    assert far.drop_count() == 0
    near.close()
    far.close()


@needs_root
def test_too_long_a_frame_is_dropped_and_counted(pair: tuple[str, str]) -> None:
    port = PacketPort(1, pair[0])
    assert port.send(bytes(12) + b"\x08\x00" + bytes(9100), None)
    assert (port.stats.unsendable, port.stats.tx_packets) == (1, 0)
    port.close()


@needs_root
def test_missing_interface() -> None:
    with pytest.raises(OSError, match="no interface"):
        PacketPort(1, "sp-missing")


@needs_root
def test_link_goes_and_comes(pair: tuple[str, str]) -> None:
    port, watch = PacketPort(1, pair[0]), LinkWatch()

    def becomes(up: bool) -> None:
        def look() -> bool:
            watch.drain()
            port.refresh()
            return port.connection.up == up

        wait_for(look, f"the port noticed up={up}")

    for command, up in (
        (f"ip link set {pair[1]} down", False),
        (f"ip link set {pair[1]} up", True),
        (f"ip link set {pair[0]} down", False),
        (f"ip link set {pair[0]} up", True),
        (f"ip link del {pair[0]}", False),
        (f"ip link add {pair[0]} type veth peer name {pair[1]}", False),
        (f"ip link set {pair[0]} up && ip link set {pair[1]} up", True),
    ):
        sh(command)
        becomes(up)
        before = port.stats.disconnected, port.stats.tx_packets
        assert port.send(FRAMES[0], None)
        after = port.stats.disconnected, port.stats.tx_packets
        assert after == ((before[0], before[1] + 1) if up else (before[0] + 1, before[1]))
        receive(port)
    port.close()
    watch.close()


@needs_root
def test_stale_notice_of_a_link_that_was_down(pair: tuple[str, str]) -> None:
    """The socket's error comes after the link is up again; the port stays connected."""
    port = PacketPort(1, pair[0])
    sh(f"ip link set {pair[0]} down && ip link set {pair[0]} up")

    def up() -> bool:
        port.refresh()
        return port.connection.up

    wait_for(up, "the link is up")
    receive(port)
    assert port.connection.up
    assert port.send(FRAMES[0], None)
    assert port.stats.tx_packets == 1
    port.close()


@needs_root
def test_port_without_room_refuses(pair: tuple[str, str]) -> None:
    """Frames that the other end does not read fill the send buffer; every loss is reported."""
    sh(f"tc qdisc add dev {pair[0]} root tbf rate 1mbit burst 20k limit 40k")
    port = PacketPort(1, pair[0])
    sent_count = sum(port.send(bytes(12) + b"\x08\x00" + bytes(8000), None) for _ in range(2000))
    assert 0 < port.stats.refused < 2000
    assert (sent_count, port.stats.tx_packets) == (2000 - port.stats.refused, 2000 - port.stats.refused)
    port.close()


@needs_root
def test_gso_segment_arrives_whole_and_leaves_in_segments(pair: tuple[str, str]) -> None:
    """A kernel's 64 KB TCP segment is received as one frame with an incomplete checksum."""
    whole = frame(NETWORKS[0], TCP(sport=1, dport=2, flags="A"), bytes(range(256)) * 200)
    near, far = PacketPort(1, pair[0]), PacketPort(2, pair[1])
    work = offload(blank(whole), GSO_TCPV4, 8000)
    work.header = b""
    assert near.send(blank(whole), work)
    ((data, received_work),) = receive(far)
    assert received_work is not None
    assert (received_work.gso_size, received_work.segments(), far.stats.rx_segments) == (8000, 7, 7)
    assert complete(data) == whole
    # An interface that cannot accept it whole gets segments with correct checksums.
    sh(f"ethtool -K {pair[0]} tso off gso off tx off")
    listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # receives nothing until bind
    listener.bind((pair[1], ETH_P_ALL))
    listener.settimeout(2)
    assert near.send(blank(whole), work)
    payload = b""
    for _ in range(7):
        segment = listener.recv(10000)
        assert complete(segment) == segment
        assert struct.unpack_from("!I", segment, 38)[0] == len(payload)
        payload += segment[54:]
    assert payload == whole[54:]
    for closable in (near, far, listener):
        closable.close()
