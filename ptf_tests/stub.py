"""Feature `stub`: traffic to the stub's address goes to the controller, except plain ACKs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from checkmate.wire.tag import HELLO_MAC_LENGTH, Hello
from controlplane import stub
from controlplane.endpoint import frames as stub_frames
from controlplane.entities import Entity, PortRate, Rate
from controlplane.forwarding import discard, forward
from controlplane.replication import mark
from ptf_tests.base import FENCE_SOURCE, SwitchTest, TaggedTest, count
from ptf_tests.packets import (
    BROADCAST,
    PEER_MAC,
    PEER_PORT,
    PORTS,
    SHADOW_PORTS,
    STUB,
    TRAINER_PORT,
    Shadow,
    TaggedSegment,
    payload,
    tag,
    tagged_segment,
)
from ptf_tests.switch import CounterValue, PuntedFrame

SHADOW = Shadow(4, isn=1_000_000)
HELLO = Hello(base=0, boundary=0, shadow_id=0, channel=0, incarnation=1, time=1).pack(bytes(HELLO_MAC_LENGTH))
SYN_OPTIONS = [("MSS", 1460), ("SAckOK", b""), ("Timestamp", (1, 0)), ("NOP", None), ("WScale", 7)]


def segment(flags: str, data: bytes = b"", shadow: Shadow = SHADOW, **fields: Any) -> bytes:
    """Return a segment from a shadow node to the stub."""
    tcp = TCP(flags=flags, **{"sport": shadow.tcp_port, "dport": STUB.port, "seq": shadow.isn, **fields})
    packet = Ether(dst=STUB.mac, src=shadow.mac) / IP(src=str(shadow.ip), dst=str(STUB.ip)) / tcp
    return bytes(packet / Raw(data) if data else packet)


def arp(op: int, target: str, to: str = BROADCAST, shadow: Shadow = SHADOW) -> bytes:
    """Return an ARP frame from a shadow node."""
    return bytes(
        Ether(dst=to, src=shadow.mac) / ARP(op=op, hwsrc=shadow.mac, psrc=str(shadow.ip), pdst=target)
    )


class StubTest(SwitchTest):
    def setUp(self) -> None:
        super().setUp()
        self.segments, self.requests = stub.punt(STUB.ip)
        self.put(self.segments, self.requests, discard(STUB.mac))

    def punts(self, *frames: bytes, port: int = SHADOW.switch_port) -> None:
        """Check that only the controller gets the frames, unchanged and with their ingress port."""
        with self.counts("plain_acks", CounterValue()):
            self.check((port, frames), {}, [PuntedFrame(frame, port) for frame in frames])

    def floods(self, *frames: bytes, port: int = SHADOW.switch_port) -> None:
        self.check((port, frames), {output: frames for output in PORTS if output != port})


class ToController(StubTest):
    def test_syn(self) -> None:
        """SYN, with options, ECN or data"""
        self.punts(
            segment("S", options=SYN_OPTIONS),
            segment("S"),
            segment("SEC"),
            segment("S", b"data"),
            segment("SA"),
        )

    def test_hello(self) -> None:
        """a hello, with and without PSH and timestamps; in two segments; anything else with payload"""
        stamps = [("NOP", None), ("NOP", None), ("Timestamp", (1, 2))]
        self.punts(
            segment("PA", HELLO),
            segment("A", HELLO),
            segment("PA", HELLO, options=stamps),
            segment("A", HELLO[:8]),
            segment("PA", HELLO[8:]),
            segment("PA", b"x"),
            segment("PA", payload(1400)),
        )

    def test_fin(self) -> None:
        """FIN, with and without ACK and data"""
        self.punts(segment("FA"), segment("F"), segment("FPA", b"bye"))

    def test_rst(self) -> None:
        """RST, with and without ACK"""
        self.punts(segment("R"), segment("RA"))

    def test_arp(self) -> None:
        """ARP requests for the stub's address, broadcast or to its own MAC"""
        frames = (arp(1, str(STUB.ip)), arp(1, str(STUB.ip), to=STUB.mac), arp(1, str(STUB.ip)) + bytes(18))
        self.punts(*frames)
        self.check_count(self.requests, *frames)

    def test_ingress_port(self) -> None:
        """each with its ingress port"""
        for number, port in enumerate(SHADOW_PORTS):
            self.punts(segment("S", shadow=Shadow(number)), port=port)
        self.punts(arp(1, str(STUB.ip)), port=1)
        self.punts(segment("PA", HELLO), port=2)

    def test_other_port_number(self) -> None:
        """segments to any TCP port of the stub's address, so that the controller can refuse them"""
        self.punts(segment("S", dport=22), segment("PA", b"GET /", dport=80))

    def test_any_mac(self) -> None:
        """segments to the stub's address go to the controller with any MAC"""
        frame = bytearray(segment("S"))
        frame[:6] = bytes.fromhex("02000000aaaa")
        self.punts(bytes(frame))

    def test_counted(self) -> None:
        """the stub's entry counts every segment that reaches it, plain ACKs too"""
        frames = [segment("S"), segment("PA", HELLO), segment("A"), segment("FA")]
        self.exchange(SHADOW.switch_port, frames)
        self.check_count(self.segments, *frames)
        self.check_count(self.requests)


class PlainAcks(StubTest):
    def test_dropped(self) -> None:
        """plain ACKs end at the switch and are counted"""
        stamps = [("NOP", None), ("NOP", None), ("Timestamp", (1, 2))]
        frames = [
            segment("A"),
            segment("A", ack=5_000_000, window=0),
            segment("A", options=stamps),
            segment("PA"),
            segment("AEC"),
            segment(""),
        ]
        with self.counts("plain_acks", count(*frames)):
            self.check((SHADOW.switch_port, frames), {})

    def test_padded(self) -> None:
        """Ethernet padding is not payload"""
        frames = [segment("A") + bytes(6), segment("A") + b"\xff" * 6]
        with self.counts("plain_acks", count(*frames)):
            self.check((SHADOW.switch_port, frames), {})

    def test_lying_offset(self) -> None:
        """a segment with a data offset beyond its end has no payload"""
        frames = [segment("A", dataofs=15), segment("A", b"abc", dataofs=6)]
        with self.counts("plain_acks", count(*frames)):
            self.check((SHADOW.switch_port, frames), {})

    def test_of_others(self) -> None:
        """ACKs to other addresses are forwarded and not counted"""
        self.put(forward(PEER_MAC, PEER_PORT))
        frame = TaggedSegment(payload=b"", dscp=0).frame()
        with self.counts("plain_acks", CounterValue()):
            self.check((TRAINER_PORT, frame), {PEER_PORT: frame})


class Elsewhere(StubTest):
    def test_other_arp(self) -> None:
        """ARP for other addresses floods: requests, gratuitous ARP"""
        self.floods(arp(1, "10.0.1.2"), arp(1, "10.0.255.2"), arp(1, str(SHADOW.ip)))

    def test_arp_reply(self) -> None:
        """ARP replies are forwarded by their MAC, even with the stub's address"""
        self.put(forward(PEER_MAC, PEER_PORT))
        reply = arp(2, str(STUB.ip), to=PEER_MAC)
        self.check((SHADOW.switch_port, reply), {PEER_PORT: reply})
        self.floods(arp(2, str(STUB.ip)))

    def test_not_tcp(self) -> None:
        """ping, UDP, fragments and IP options to the stub's address are forwarded by MAC, and discarded"""
        ip = IP(src=str(SHADOW.ip), dst=str(STUB.ip))
        ether = Ether(dst=STUB.mac, src=SHADOW.mac)
        fragment = Ether(segment("S"))
        fragment[IP].flags = "MF"
        del fragment[IP].chksum
        with_options = Ether(segment("S"))
        with_options[IP].options = [bytes([1, 1, 1, 0])]
        del with_options[IP].chksum, with_options[IP].ihl, with_options[IP].len
        frames = [ether / ip / ICMP(), ether / ip / UDP() / Raw(b"data"), fragment, with_options]
        with self.counts("plain_acks", CounterValue()):
            self.check((SHADOW.switch_port, [bytes(frame) for frame in frames]), {})

    def test_without_entry(self) -> None:
        """without the stub's entries, nothing is punted"""
        frames = segment("S"), segment("A"), arp(1, str(STUB.ip))
        self.check((3, frames[0]), {}, [PuntedFrame(frames[0], 3)])
        self.drop(self.segments, self.requests, discard(STUB.mac))
        with self.counts("plain_acks", CounterValue()):
            self.floods(*frames)


class Tagged(TaggedTest):
    def test_before_replication(self) -> None:
        """a tagged segment to the stub's address goes to the controller, and is not replicated"""
        self.put(*stub.punt(STUB.ip))
        frame = tagged_segment(tag(), destination=STUB.ip).frame()
        with self.counts("passed", CounterValue(), CounterValue()):
            self.check((TRAINER_PORT, frame), {}, [PuntedFrame(frame, TRAINER_PORT)])


class PacketOut(StubTest):
    def test_each_port(self) -> None:
        """the controller's frames leave by the specified port, and by no other"""
        for port in PORTS:
            self.check_packet_out(
                port, bytes(Ether(dst=PEER_MAC, src=STUB.mac, type=0x88B5) / Raw(b"x" * 60))
            )

    def test_as_they_are(self) -> None:
        """no feature changes them: tagged segments, segments and ARP to the stub, broadcasts, long frames"""
        self.put(mark(0x20))
        # A Tofino's driver sends 2,048 bytes at most, with the two of `packet_out`.
        longest = 2046 if self.lab.hardware else 9000
        inside = IP(src="10.9.0.1", dst="10.9.0.2") / TCP() / Raw(payload(longest - 54))
        for frame in (
            tagged_segment(tag()).frame(),
            segment("S"),
            segment("A"),
            arp(1, str(STUB.ip)),
            arp(1, "10.0.1.9"),
            bytes(Ether(dst=BROADCAST, src=STUB.mac) / inside),
            bytes(Ether(dst=BROADCAST, src=STUB.mac, type=0x88B5) / Raw(b"x")),
        ):
            self.check_packet_out(7, frame)

    def test_handshake(self) -> None:
        """SYN and hello, with the control plane's own answers, as the shadow node's kernel sees them"""
        syn = segment("S", options=[("MSS", 1460), ("NOP", None), ("WScale", 7)])
        self.punts(syn)
        parsed = stub_frames.parse(syn)
        assert parsed is not None
        answer = stub_frames.syn_ack(STUB, parsed)
        self.check_packet_out(SHADOW.switch_port, answer)
        self._is(answer, flags="SA", seq=0xFFFFFFFF, ack=SHADOW.isn + 1)
        hello = segment("PA", HELLO, seq=SHADOW.isn + 1, ack=0)
        self.punts(hello)
        parsed = stub_frames.parse(hello)
        assert parsed is not None
        answer = stub_frames.acknowledge(STUB, parsed)
        self.check_packet_out(SHADOW.switch_port, answer)
        self._is(answer, flags="A", seq=0, ack=SHADOW.isn + 41)

    def _is(self, frame: bytes, flags: str, seq: int, ack: int) -> None:
        packet = Ether(frame)
        self.assertEqual((SHADOW.mac, STUB.mac), (packet.dst, packet.src))
        self.assertEqual((str(STUB.ip), str(SHADOW.ip)), (packet[IP].src, packet[IP].dst))
        self.assertEqual((STUB.port, SHADOW.tcp_port), (packet[TCP].sport, packet[TCP].dport))
        self.assertEqual((flags, seq, ack), (str(packet[TCP].flags), packet[TCP].seq, packet[TCP].ack))
        # A SACK block or timestamps do not share headers with later output of the switch.
        self.assertLessEqual({name for name, _ in packet[TCP].options}, {"MSS", "WScale", "NOP", "EOL"})
        again = packet.copy()
        del again[IP].chksum, again[TCP].chksum
        self.assertEqual(frame, bytes(again), "checksums")


class StubLimits(StubTest):
    """Clients and strangers of the stub, at one port and at two."""

    def setUp(self) -> None:
        super().setUp()
        self.stranger = replace(SHADOW, number=SHADOW.number + 1)
        self.put(*(stub.client(port, FENCE_SOURCE) for port in (SHADOW.switch_port, 9)))

    def limit(self, *limits: Entity) -> None:
        """Insert limits. PI answers the write of a rate before a chip has it."""
        self.put(*limits)
        if self.lab.hardware:
            time.sleep(0.5)

    def flood(self, shadow: Shadow, port: int, frames: int = 40) -> int:
        """Send SYNs; return the number that reaches the controller, and check that the rest is dropped."""
        syns = [segment("S", shadow=shadow, seq=number) for number in range(frames)]
        outputs, punted = self.exchange(port, syns)
        self.assertFalse(any(outputs.values()), outputs)
        return len(punted)

    def test_stranger(self) -> None:
        """a stranger's flood: about a burst of it reaches the controller, and the rest is counted"""
        self.limit(PortRate(SHADOW.switch_port, Rate(packets=1, burst=10)))
        before = self.switch.counts("limited")[0].packets
        punt_count = self.flood(self.stranger, SHADOW.switch_port)
        self.assertTrue(8 <= punt_count <= 15, punt_count)
        self.assertEqual(40 - punt_count, self.switch.counts("limited")[0].packets - before)

    def test_client_beside_stranger(self) -> None:
        """a client, at the port of a stranger's flood"""
        self.limit(
            stub.client(SHADOW.switch_port, SHADOW.ip),
            PortRate(SHADOW.switch_port, Rate(packets=1, burst=10)),
        )
        before = self.switch.counts("limited")[1]
        self.assertLess(self.flood(self.stranger, SHADOW.switch_port), 20)
        self.assertEqual(40, self.flood(SHADOW, SHADOW.switch_port))
        self.assertEqual(before, self.switch.counts("limited")[1])

    def test_client_elsewhere(self) -> None:
        """a client's address at another port is a stranger"""
        self.limit(stub.client(SHADOW.switch_port, SHADOW.ip), PortRate(9, Rate(packets=1, burst=10)))
        self.assertLess(self.flood(SHADOW, 9), 20)

    def test_other_port(self) -> None:
        """a flood at one port costs strangers at another nothing"""
        self.limit(*(PortRate(port, Rate(packets=1, burst=10)) for port in (SHADOW.switch_port, 9)))
        self.flood(self.stranger, SHADOW.switch_port)
        self.assertTrue(8 <= self.flood(self.stranger, 9) <= 15)

    def test_client_rate(self) -> None:
        """a client is limited by its own rate"""
        entry = replace(stub.client(SHADOW.switch_port, SHADOW.ip), rate=Rate(packets=1, burst=10))
        self.limit(entry)
        before = self.switch.counts("limited")[1].packets
        punt_count = self.flood(SHADOW, SHADOW.switch_port)
        self.assertTrue(8 <= punt_count <= 15, punt_count)
        self.assertEqual(40 - punt_count, self.switch.counts("limited")[1].packets - before)

    def test_arp(self) -> None:
        """ARP requests count like segments"""
        self.limit(PortRate(SHADOW.switch_port, Rate(packets=1, burst=10)))
        outputs, punted = self.exchange(
            SHADOW.switch_port, [arp(1, str(STUB.ip), shadow=self.stranger) for _ in range(40)]
        )
        self.assertTrue(8 <= len(punted) <= 15, len(punted))
        self.assertFalse(any(outputs.values()), outputs)
