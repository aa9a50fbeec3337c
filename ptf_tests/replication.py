"""Feature `replication`: the group of tagged segments by port, addresses, shadow id and channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv4Address

from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from controlplane.entities import MulticastGroup, TableEntry
from controlplane.replication import enter, mark, replicate
from controlplane.streams import rewrite
from ptf_tests.base import TaggedTest, count
from ptf_tests.packets import (
    BOUNDARY,
    PEER_IP,
    PEER_MAC,
    PEER_PORT,
    SACK,
    STUB,
    TIMESTAMPS,
    TRAINER_IP,
    TRAINER_MAC,
    TRAINER_PORT,
    Shadow,
    TaggedSegment,
    expected_copy,
    payload,
    tag,
    tagged_segment,
)
from ptf_tests.switch import CounterValue

SHADOW = Shadow(0)
TAGGED = tagged_segment(tag(sequence=5000))


class Replicated(TaggedTest):
    def test_option_first(self) -> None:
        """the tag as the only option: a training copy and a shadow copy"""
        entry = self.protect(SHADOW)
        self._replicates(entry, TAGGED)

    def test_option_after_timestamps(self) -> None:
        """the tag after timestamps: a training copy and a shadow copy"""
        entry = self.protect(SHADOW)
        self._replicates(entry, tagged_segment(tag(sequence=5000), timestamps=True))

    def _replicates(self, entry: TableEntry, segment: TaggedSegment) -> None:
        frame = replace(segment, sequence=0).frame()
        copy = expected_copy(segment, SHADOW, sequence=5000)
        with self.counts("passed", CounterValue(), CounterValue()):
            self.check((TRAINER_PORT, frame), {PEER_PORT: frame, SHADOW.switch_port: copy})
        self.check_count(entry, frame)

    def test_forged(self) -> None:
        """the rank's addresses at another port: forwarded and counted, but not replicated"""
        entry = self.protect(SHADOW)
        frame = replace(TAGGED, sequence=0).frame()
        for port in (9, SHADOW.switch_port):
            with self.counts("passed", CounterValue(), count(frame)):
                self.check((port, frame), {PEER_PORT: frame})
        self.check_count(entry)

    def test_not_by_mac(self) -> None:
        """only the group determines copies: an unknown destination MAC does not flood them"""
        self.protect(SHADOW)
        segment = replace(TAGGED, sequence=0, destination_mac="02:00:00:00:00:99")
        copy = expected_copy(segment, SHADOW, sequence=5000)
        self.check((TRAINER_PORT, segment.frame()), {PEER_PORT: segment.frame(), SHADOW.switch_port: copy})

    def test_dscp(self) -> None:
        """the other bits of DSCP and ECN do not matter"""
        self.protect(SHADOW)
        for dscp, ecn in ((0x20, 0), (0x20, 3), (0x2E, 1), (0x3F, 2)):
            segment = replace(TAGGED, sequence=0, dscp=dscp, ecn=ecn)
            copy = expected_copy(segment, SHADOW, sequence=5000)
            out = {PEER_PORT: segment.frame(), SHADOW.switch_port: copy}
            self.check((TRAINER_PORT, segment.frame()), out)

    def test_other_dscp_bit(self) -> None:
        """a job that marks with another bit of DSCP, beside the first"""
        self.put(mark(0x02))
        self.protect(SHADOW)
        for dscp in (0x02, 0x20, 0x22):
            segment = replace(TAGGED, sequence=0, dscp=dscp)
            copy = expected_copy(segment, SHADOW, sequence=5000)
            out = {PEER_PORT: segment.frame(), SHADOW.switch_port: copy}
            self.check((TRAINER_PORT, segment.frame()), out)


class Groups(TaggedTest):
    def test_shadow_ids_and_channels(self) -> None:
        """each of 16 shadow ids, the greatest included, and 8 channels has its own group"""
        frames: list[bytes] = []
        out: dict[int, list[bytes]] = {PEER_PORT: frames}
        entries: list[tuple[TableEntry, bytes]] = []
        for number, shadow_id in enumerate((*range(8), *range(0xFFF8, 0x10000))):
            for channel in range(8):
                stream = 8 * number + channel
                first = Shadow(number, isn=1000 * stream)
                second = Shadow((number + 1 + channel) % 16, isn=1000 * stream + 500)
                entry = self.protect(first, second, shadow_id=shadow_id, channel=channel, group=2 + stream)
                option = tag(sequence=stream, anchor=TAGGED.sequence, shadow_id=shadow_id, channel=channel)
                segment = replace(TAGGED, options=option)
                entries.append((entry, segment.frame()))
                frames.append(segment.frame())
                for shadow in (first, second):
                    copy = expected_copy(segment, shadow, sequence=stream)
                    out.setdefault(shadow.switch_port, []).append(copy)
        self.check((TRAINER_PORT, frames), out)
        for entry, frame in entries:
            self.check_count(entry, frame)

    def test_one_port(self) -> None:
        """a group with 1 shadow port"""
        self._ports(1)

    def test_two_ports(self) -> None:
        """a group with 2 shadow ports"""
        self._ports(2)

    def test_eight_ports(self) -> None:
        """a group with 8 shadow ports"""
        self._ports(8)

    def test_sixteen_ports(self) -> None:
        """a group with 16 shadow ports"""
        self._ports(16)

    def _ports(self, number: int) -> None:
        shadows = [Shadow(n, isn=n * 1_000_003) for n in range(number)]
        entry = self.protect(*shadows)
        segment = replace(TAGGED, sequence=0, payload=payload(1400))
        frame = segment.frame()
        copies = {shadow.switch_port: expected_copy(segment, shadow, sequence=5000) for shadow in shadows}
        self.check((TRAINER_PORT, frame), {PEER_PORT: frame, **copies})
        self.check_count(entry, frame)

    def test_shared_group(self) -> None:
        """two boundaries that share a group have separate streams"""
        second_shadow = Shadow(0, isn=77)
        source = IPv4Address("10.0.0.7")
        self.protect(SHADOW)
        self.put(
            enter(TRAINER_PORT, source, PEER_IP, boundary=BOUNDARY + 1),
            replicate(BOUNDARY + 1, 0, 0, group=2),
            rewrite((BOUNDARY + 1, 0, 0, 1), 1, second_shadow.connection(), STUB),
        )
        first, second = replace(TAGGED, sequence=0), replace(TAGGED, sequence=0, source=source)
        self.check(
            (TRAINER_PORT, [first.frame(), second.frame()]),
            {
                PEER_PORT: [first.frame(), second.frame()],
                SHADOW.switch_port: [
                    expected_copy(first, SHADOW, sequence=5000),
                    expected_copy(second, second_shadow, sequence=5000),
                ],
            },
        )

    def test_no_group(self) -> None:
        """a segment that an entry replicates to group 0 is forwarded"""
        self.put(replicate(BOUNDARY, 0, 0, group=0))
        frame = TAGGED.frame()
        self.check((TRAINER_PORT, frame), {PEER_PORT: frame})

    def test_same_port(self) -> None:
        """a training copy and two shadow copies that leave by one port, such as a link"""
        first, second = Shadow(0, isn=1), Shadow(1, isn=2)
        self.put(
            rewrite((BOUNDARY, 0, 0, 1), 1, first.connection(), STUB),
            rewrite((BOUNDARY, 0, 0, 2), 1, second.connection(), STUB),
            MulticastGroup(2, frozenset({(PEER_PORT, 0), (PEER_PORT, 1), (PEER_PORT, 2)})),
            replicate(BOUNDARY, 0, 0, group=2),
        )
        segment = replace(TAGGED, sequence=0)
        outputs, punted = self.exchange(TRAINER_PORT, [segment.frame()])
        copies = [expected_copy(segment, shadow, sequence=5000) for shadow in (first, second)]
        # The order of a group's copies at one port depends on the target.
        self.assertEqual(sorted([segment.frame(), *copies]), sorted(outputs.pop(PEER_PORT)))
        self.assertEqual([], punted)
        self.assertFalse(any(outputs.values()), outputs)


class NotReplicated(TaggedTest):
    """Segments that must not be replicated: forwarded unchanged, and counted if they have the DSCP bit."""

    def setUp(self) -> None:
        super().setUp()
        self.entry = self.protect(SHADOW)

    def _passes(
        self,
        *frames: bytes,
        without_tag: bool = False,
        without_entry: bool = False,
        in_header: Sequence[bytes] = (),
    ) -> None:
        """Check frames, and those that end inside a header, which a chip's parser drops."""
        if self.lab.hardware:
            self.check((TRAINER_PORT, in_header), {})
        else:
            frames += tuple(in_header)
        nothing, all_of_them = CounterValue(), count(*frames)
        increments = (all_of_them if without_tag else nothing, all_of_them if without_entry else nothing)
        with self.counts("passed", *increments):
            self.check((TRAINER_PORT, frames), {PEER_PORT: frames})
        self.check_count(self.entry)
        # The control: a similar segment that is replicated.
        segment = replace(TAGGED, sequence=0)
        copy = expected_copy(segment, SHADOW, sequence=5000)
        self.check((TRAINER_PORT, segment.frame()), {PEER_PORT: segment.frame(), SHADOW.switch_port: copy})

    def test_dscp_without_option(self) -> None:
        """DSCP without the option"""
        without = [replace(TAGGED, options=options) for options in (b"", TIMESTAMPS, SACK)]
        self._passes(*(segment.frame() for segment in without), without_tag=True)

    def test_option_without_dscp(self) -> None:
        """the option without DSCP"""
        self._passes(*(replace(TAGGED, dscp=dscp).frame() for dscp in (0, 0x1F, 0x08)))

    def test_other_exid(self) -> None:
        """another ExID"""
        options = [b"\xfd\x10" + exid + tag()[4:] for exid in (b"\xc4\xed", b"\x00\x00", b"\xec\xc4")]
        frames = [replace(TAGGED, options=option).frame() for option in options]
        frames += [replace(TAGGED, options=TIMESTAMPS + option).frame() for option in options]
        self._passes(*frames, without_tag=True)

    def test_other_kind_or_length(self) -> None:
        """another option kind, or another length"""
        options = [b"\xfe\x10" + tag()[2:], b"\xfd\x0f" + tag()[2:], b"\xfd\x11" + tag()[2:]]
        self._passes(*(replace(TAGGED, options=option).frame() for option in options), without_tag=True)

    def test_unknown_source(self) -> None:
        """an unknown source"""
        segment = replace(TAGGED, source=IPv4Address("10.0.0.3"))
        self._passes(segment.frame(), without_entry=True)

    def test_unknown_destination(self) -> None:
        """an unknown destination"""
        segment = replace(TAGGED, destination=IPv4Address("10.0.0.3"))
        self._passes(segment.frame(), without_entry=True)

    def test_unknown_shadow_id(self) -> None:
        """an unknown shadow id"""
        segments = [replace(TAGGED, options=tag(shadow_id=shadow_id)) for shadow_id in (1, 256, 65535)]
        self._passes(*(segment.frame() for segment in segments), without_entry=True)

    def test_unknown_channel(self) -> None:
        """an unknown channel"""
        segments = [replace(TAGGED, options=tag(channel=channel)) for channel in (1, 255)]
        self._passes(*(segment.frame() for segment in segments), without_entry=True)

    def test_no_payload(self) -> None:
        """no payload: an ACK that carries the tag, also with Ethernet padding"""
        bare = replace(TAGGED, payload=b"").frame()
        self._passes(bare, bare + bytes(4), without_tag=True)

    def test_fragment(self) -> None:
        """fragments: the first, and a later one"""
        first, later = TAGGED.packet(), TAGGED.packet()
        first[IP].flags = "MF"
        later[IP].flags = 0
        later[IP].frag = 100
        self._passes(bytes(first), bytes(later), without_tag=True)

    def test_ip_options(self) -> None:
        """IP options"""
        packet = TAGGED.packet()
        packet[IP].options = [(bytes([1, 1, 1, 0]))]
        # A parser that assumes an IP header of 20 bytes would find a tag in these words.
        shifted = replace(
            TAGGED, acknowledgement=0x9000_0000, urgent_pointer=0xC4EC, options=tag()[4:]
        ).packet()
        shifted[IP].options = packet[IP].options
        shifted[TCP].chksum = 0xFD10
        frames = [bytes(packet), bytes(shifted)]
        self.assertEqual([0x46, 0x46], [frame[14] for frame in frames])
        self.assertEqual(tag(), frames[1][54:70])
        self._passes(*frames, without_tag=True)

    def test_sack_before_tag(self) -> None:
        """SACK before the tag"""
        blocks = [SACK + tag(), TIMESTAMPS + SACK + tag()[:12]]
        self._passes(*(replace(TAGGED, options=block).frame() for block in blocks), without_tag=True)

    def test_other_layouts(self) -> None:
        """the tag before timestamps, after NOPs, or before more options"""
        blocks = [
            tag() + TIMESTAMPS,
            bytes([1, 1, 1, 1]) + tag(),
            tag() + bytes([1, 1, 1, 1]),
            tag() + tag(),
            TIMESTAMPS + tag() + bytes([1, 1, 1, 1]),
        ]
        self._passes(*(replace(TAGGED, options=block).frame() for block in blocks), without_tag=True)

    def test_lying_offset(self) -> None:
        """a data offset that does not match the options"""
        long = replace(TAGGED, payload=payload(200))
        after = replace(long, options=TIMESTAMPS + tag())
        lies = [replace(long, data_offset=words) for words in (0, 4, 5, 8, 10, 12, 15)]
        lies += [replace(after, data_offset=words) for words in (5, 9, 11, 13, 15)]
        self._passes(*(segment.frame() for segment in lies), without_tag=True)

    def test_offset_beyond_end(self) -> None:
        """a data offset beyond the end of the datagram or of the frame"""
        # A chip's parser also has padding up to 60 bytes, and the four of the check sequence.
        beyond: list[bytes] = []
        in_header: list[bytes] = []
        for length in (0, 4, 15):
            frame = replace(TAGGED, options=tag()[:length], payload=b"", data_offset=9).frame()
            (in_header if length == 4 else beyond).append(frame)
        for length in (0, 3, 4, 11, 12, 15, 27):
            after = (TIMESTAMPS + tag())[:length]
            frame = replace(TAGGED, options=after, payload=b"", data_offset=12).frame()
            (in_header if length < 12 else beyond).append(frame)
        # The frame continues after the datagram: the apparent tag and payload are not part of it.
        for length in (0, 19, 20, 40, 56):
            outside = TAGGED.packet()
            outside[IP].len = length
            beyond.append(bytes(outside))
        self._passes(*beyond, in_header=in_header, without_tag=True)

    def test_cut_off(self) -> None:
        """the frame ends before the datagram, inside the option"""
        whole = TAGGED.frame()
        in_header = [whole[:length] for length in (58, 62, 65)]
        self._passes(whole[:54], whole[:56], in_header=in_header, without_tag=True)

    def test_other_protocols(self) -> None:
        """UDP and a broken IP header with DSCP; VLAN and IPv6, whose DSCP does not count"""
        udp = IP(src=str(TRAINER_IP), dst=str(PEER_IP), tos=0x80) / UDP() / Raw(tag() * 3)
        version = TAGGED.packet()
        version[IP].version = 5
        self._passes(self._to_peer(udp), bytes(version), without_tag=True)

    def test_not_ipv4(self) -> None:
        """a tagged segment inside VLAN, and one over IPv6"""
        over_ipv6 = IPv6(src="fd00::1", dst="fd00::2", tc=0x80) / TCP(dataofs=9) / Raw(tag() + b"payload")
        in_vlan = Dot1Q(vlan=3) / TAGGED.packet()[IP]
        self._passes(self._to_peer(over_ipv6), self._to_peer(in_vlan))

    def _to_peer(self, inside: Packet) -> bytes:
        return bytes(Ether(dst=PEER_MAC, src=TRAINER_MAC) / inside)
