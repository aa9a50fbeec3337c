"""Feature `streams`: the rewrite of a shadow copy into the shadow node's own TCP stream."""

from __future__ import annotations

from dataclasses import replace

from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether

from controlplane.streams import expect, lose, rewrite
from ptf_tests.base import StreamTest, count
from ptf_tests.packets import (
    BOUNDARY,
    PEER_PORT,
    STUB,
    TRAINER_PORT,
    Shadow,
    copy_packet,
    expected_copy,
    payload,
    stream_key,
    tag,
    tagged_segment,
)
from ptf_tests.switch import CounterValue

SHADOW = Shadow(0)
TAGGED = tagged_segment(tag(), sequence=0, payload=payload(200))
TOP = 2**32


class Sequence(StreamTest):
    def test_anchor(self) -> None:
        """tag.seq + (tcp.seq - anchor), mod 2^32, also across the wrap of each of the three"""
        self.protect(SHADOW)
        for sequence, anchor, tcp_sequence, expected in (
            (0, 0, 0, 0),
            (1000, 7000, 7000, 1000),
            (1000, 7000, 8448, 2448),
            (1000, TOP - 100, 348, 1448),
            (TOP - 1000, 500, 1948, 448),
            (TOP - 1, TOP - 1, 0, 0),
            (TOP - 1, 0, TOP - 1, TOP - 2),
            (0, 1, 0, TOP - 1),
            (0x80000000, 0x7FFFFFFF, 0x80000000, 0x80000001),
        ):
            with self.subTest(sequence=sequence, anchor=anchor, tcp_sequence=tcp_sequence):
                segment = replace(TAGGED, options=tag(sequence, anchor), sequence=tcp_sequence)
                self.check_copy(segment, SHADOW, expected)

    def test_base(self) -> None:
        """a stream that is joined at a base begins at 0 there, also across the wrap"""
        for base, sequence, expected in (
            (1, 1, 0),
            (5_000_000, 5_000_000, 0),
            (5_000_000, 5_001_448, 1448),
            (TOP - 100, TOP - 100, 0),
            (TOP - 100, 1348, 1448),
            (3_000_000_000, 2_999_998_552, TOP - 1448),
        ):
            with self.subTest(base=base, sequence=sequence):
                shadow = Shadow(0, base=base)
                entry = self.connect(shadow)
                groups = self.replicate(shadow)
                option = tag(sequence, anchor=123)
                self.check_copy(replace(TAGGED, options=option, sequence=123), shadow, expected)
                self.drop(groups, entry, self.switch.holdings().groups[2])

    def test_chunk(self) -> None:
        """one option for a whole chunk: each of its segments has its own position, across the wrap of both"""
        self.protect(SHADOW)
        sequence, anchor = TOP - 30_000, TOP - 10_000
        frames, copies = [], []
        for start in range(0, 65_000, 1448):
            data = payload(min(1448, 65_000 - start), seed=start)
            option = tag(sequence, anchor)
            segment = tagged_segment(option, sequence=(anchor + start) % TOP, payload=data, timestamps=True)
            frames.append(segment.frame())
            copies.append(expected_copy(segment, SHADOW, (sequence + start) % TOP))
        self.check((TRAINER_PORT, frames), {PEER_PORT: frames, SHADOW.switch_port: copies})

    def test_retransmission(self) -> None:
        """a retransmission, segmented differently and with new timestamps, maps to the same bytes"""
        self.protect(SHADOW)
        data = payload(3000)
        for start, end in ((0, 1448), (1448, 2896), (0, 3000), (700, 2000)):
            option = tag(sequence=9000, anchor=500)
            segment = tagged_segment(option, sequence=500 + start, payload=data[start:end])
            self.check_copy(segment, SHADOW, 9000 + start)


class Incarnations(StreamTest):
    def test_side_by_side(self) -> None:
        """two concurrent incarnations, each with its own connection"""
        old, new = Shadow(0, isn=100), Shadow(0, isn=999_999, base=4000)
        self.put(expect(BOUNDARY, 2))
        entries = [self.connect(old, incarnation=1), self.connect(new, incarnation=2)]
        self.replicate(old)
        segments = [replace(TAGGED, options=tag(sequence=5000, incarnation=number)) for number in (1, 2)]
        self.check_copy(segments[0], old, 5000)
        self.check_copy(segments[1], new, 1000)
        for entry, segment in zip(entries, segments, strict=True):
            self.check_count(entry, segment.frame())

    def test_any_number(self) -> None:
        """incarnations are compared only for equality: 0 and 255 are not special"""
        self.replicate(SHADOW)
        self.connect(SHADOW, incarnation=0)
        self.connect(Shadow(0, isn=5), incarnation=255)
        self.check_copy(replace(TAGGED, options=tag(incarnation=0)), SHADOW, 0)
        self.check_copy(replace(TAGGED, options=tag(incarnation=255)), Shadow(0, isn=5), 0)


class Rewrite(StreamTest):
    def test_fields(self) -> None:
        """addresses, ports, acknowledgement and window are the stream's; TTL, id and DF are unchanged"""
        for isn, expected in ((0, 41), (0x8000_0000, 0x8000_0029), (TOP - 1, 40), (TOP - 41, 0)):
            shadow = Shadow(5, isn=isn)
            with self.subTest(isn=isn):
                entry, group = self.connect(shadow), self.replicate(shadow)
                segment = replace(TAGGED, ttl=3, identification=0xFFFF, ip_flags="")
                self.check_copy(segment, shadow, 0)
                copy = Ether(expected_copy(segment, shadow, 0))
                self.assertEqual(expected, copy[TCP].ack)
                self.drop(group, entry, self.switch.holdings().groups[2])

    def test_flags(self) -> None:
        """ACK is set, PSH unchanged, and other flags, the urgent pointer and reserved bits are cleared"""
        self.protect(SHADOW)
        for flags in ("A", "PA", "", "P", "UA", "ECA", "FPA", "SA", "RA", "NA", "FSRPAUECN"):
            with self.subTest(flags=flags):
                segment = replace(TAGGED, flags=flags, urgent_pointer=0x4321, reserved=7, window=0)
                self.check_copy(segment, SHADOW, 0)

    def test_dscp(self) -> None:
        """DSCP and ECN are unchanged"""
        self.protect(SHADOW)
        for dscp in (0x20, 0x21, 0x2E, 0x3F):
            for ecn in range(4):
                self.check_copy(replace(TAGGED, dscp=dscp, ecn=ecn), SHADOW, 0)

    def test_options(self) -> None:
        """options are removed, lengths and checksums correct, for payloads of 1 to 8,900 bytes"""
        self.protect(SHADOW)
        for length in (1, 2, 3, 5, 16, 17, 536, 1447, 1448, 8900):
            for timestamps in (False, True):
                with self.subTest(length=length, timestamps=timestamps):
                    segment = tagged_segment(
                        tag(sequence=77), timestamps=timestamps, sequence=0, payload=payload(length)
                    )
                    self.check_copy(segment, SHADOW, 77)

    def test_trailer(self) -> None:
        """bytes after the datagram stay after it, and have no effect"""
        self.protect(SHADOW)
        trailer = b"\xde\xad\xbe\xef\x01"
        frame = TAGGED.frame() + trailer
        copy = expected_copy(TAGGED, SHADOW, 0) + trailer
        self.check((TRAINER_PORT, frame), {PEER_PORT: frame, SHADOW.switch_port: copy})

    def test_holders(self) -> None:
        """two holders: each copy is in its own stream"""
        first, second = Shadow(0, isn=11), Shadow(7, isn=22, base=1000)
        self.protect(first, second)
        self.check_copies(replace(TAGGED, options=tag(sequence=1500)), {first: 1500, second: 500})

    def test_channels(self) -> None:
        """two channels and two shadow ids of one boundary: four streams"""
        streams = {(s, c): Shadow(0, isn=10 * s + c) for s in (0, 1) for c in (0, 1)}
        for number, ((shadow_id, channel), shadow) in enumerate(streams.items()):
            self.protect(shadow, shadow_id=shadow_id, channel=channel, group=2 + number)
        for (shadow_id, channel), shadow in streams.items():
            option = tag(sequence=100, shadow_id=shadow_id, channel=channel)
            self.check_copy(replace(TAGGED, options=option), shadow, 100)

    def test_replaced(self) -> None:
        """a new connection for a stream is used from the next segment on"""
        entry = self.connect(SHADOW)
        self.replicate(SHADOW)
        self.check_copy(TAGGED, SHADOW, 0)
        newer = Shadow(0, isn=4711, base=100)
        self.change(entry, rewrite(stream_key(), 1, newer.connection(), STUB))
        self.check_copy(replace(TAGGED, options=tag(sequence=200)), newer, 100)

    def test_counted(self) -> None:
        """each stream counts its packets and bytes, with their received length"""
        first, second = Shadow(0), Shadow(1)
        entries = [self.connect(first, holder=1), self.connect(second, holder=2)]
        group = self.replicate(first, second)
        frames = [replace(TAGGED, payload=payload(length)).frame() for length in (10, 1000, 1448)]
        self.exchange(TRAINER_PORT, frames)
        for entry in (*entries, group):
            self.check_count(entry, *frames)


class TrainingTraffic(StreamTest):
    def test_untouched(self) -> None:
        """the training copy is unchanged, byte for byte, for any checksums and fields"""
        shadow = Shadow(0)
        self.protect(shadow)
        for timestamps in (False, True):
            for flags in ("A", "FSRPAUECN"):
                segment = tagged_segment(
                    tag(12345),
                    timestamps=timestamps,
                    flags=flags,
                    reserved=7,
                    urgent_pointer=9,
                    window=7,
                    ttl=1,
                )
                packet = segment.packet()
                packet[IP].chksum, packet[TCP].chksum = 0xBAD0, 0xBAD1
                outputs, _ = self.exchange(TRAINER_PORT, [bytes(packet)])
                self.assertEqual([bytes(packet)], outputs[PEER_PORT])
                self.assertEqual(1, len(outputs[shadow.switch_port]))


class NotConnected(StreamTest):
    def setUp(self) -> None:
        super().setUp()
        self.loss_entries = [lose(stream_key(holder=holder)) for holder in (1, 2)]
        self.put(*self.loss_entries)
        self.frame = TAGGED.frame()

    def _loses(
        self, losses: tuple[CounterValue, CounterValue], copies: dict[int, bytes] | None = None
    ) -> None:
        with self.counts("losses", *losses):
            self.check((TRAINER_PORT, self.frame), {PEER_PORT: self.frame, **(copies or {})})

    def test_before_any_hello(self) -> None:
        """no stream connected or expected: training gets its segment, the loss is counted by stream"""
        entry = self.replicate(SHADOW)
        self._loses((count(self.frame), CounterValue()))
        self.check_count(self.loss_entries[0], self.frame)
        self.check_count(self.loss_entries[1])
        self.check_count(entry, self.frame)

    def test_current_incarnation(self) -> None:
        """the current incarnation, not connected: counted by stream"""
        self.put(expect(BOUNDARY, 1))
        self.replicate(SHADOW)
        self._loses((count(self.frame), CounterValue()))
        self.check_count(self.loss_entries[0], self.frame)

    def test_old_incarnation(self) -> None:
        """not the current incarnation: counted separately, and not for the stream"""
        self.put(expect(BOUNDARY, 2))
        self.replicate(SHADOW)
        self.connect(SHADOW, incarnation=2)
        self._loses((CounterValue(), count(self.frame)))
        self.check_count(self.loss_entries[0])

    def test_one_of_two_holders(self) -> None:
        """one of two holders connected: it gets its copy, the other copy is lost"""
        second = Shadow(7)
        self.replicate(SHADOW, second)
        self.connect(second, holder=2)
        copy = expected_copy(TAGGED, second, 0)
        self._loses((count(self.frame), CounterValue()), {second.switch_port: copy})
        self.check_count(self.loss_entries[0], self.frame)
        self.check_count(self.loss_entries[1])

    def test_neither_of_two_holders(self) -> None:
        """neither of two holders connected: two losses"""
        self.replicate(SHADOW, Shadow(7))
        self._loses((count(self.frame, self.frame), CounterValue()))
        for entry in self.loss_entries:
            self.check_count(entry, self.frame)

    def test_without_counter_entry(self) -> None:
        """a loss without an entry of `lost` is still in the total"""
        self.drop(*self.loss_entries)
        self.replicate(SHADOW)
        self._loses((count(self.frame), CounterValue()))

    def test_disconnected(self) -> None:
        """a stream has losses only after its disconnection"""
        entry = self.connect(SHADOW)
        self.replicate(SHADOW)
        copy = expected_copy(TAGGED, SHADOW, 0)
        self._loses((CounterValue(), CounterValue()), {SHADOW.switch_port: copy})
        self.check_count(self.loss_entries[0])
        self.drop(entry)
        self._loses((count(self.frame), CounterValue()))
        self.check_count(self.loss_entries[0], self.frame)


class Checksums(StreamTest):
    def test_zero(self) -> None:
        """checksums that are zero, in the copy or in the original"""
        self.protect(SHADOW)
        fields = {"payload": payload(198) + bytes(2), "identification": 0}
        plain = replace(TAGGED, **fields)  # type: ignore[arg-type]
        for packet in (plain.packet(), copy_packet(plain, SHADOW, 0)):
            parsed = Ether(bytes(packet))
            # A word with the value of the checksum without it makes the checksum zero.
            segment = replace(
                plain,
                payload=payload(198) + parsed[TCP].chksum.to_bytes(2, "big"),
                identification=parsed[IP].chksum,
            )
            both = Ether(segment.frame()), Ether(expected_copy(segment, SHADOW, 0))
            self.assertIn(
                (0, 0), [(copied_packet[IP].chksum, copied_packet[TCP].chksum) for copied_packet in both]
            )
            self.check_copy(segment, SHADOW, 0)

    def test_many(self) -> None:
        """checksums are correct for 64 segments that differ in every field"""
        self.protect(SHADOW)
        frames, copies = [], []
        for number in range(64):
            mixed = number * 2654435761 % TOP
            segment = tagged_segment(
                tag(sequence=mixed, anchor=mixed * 3 % TOP),
                timestamps=bool(number & 1),
                sequence=mixed * 5 % TOP,
                acknowledgement=mixed * 7 % TOP,
                source_port=mixed & 0xFFFF,
                destination_port=mixed >> 16,
                window=mixed * 11 & 0xFFFF,
                identification=mixed * 13 & 0xFFFF,
                ttl=number + 1,
                payload=payload(number * 3 + 1, seed=number),
            )
            frames.append(segment.frame())
            copies.append(expected_copy(segment, SHADOW, (mixed + mixed * 5 - mixed * 3) % TOP))
        self.check((TRAINER_PORT, frames), {PEER_PORT: frames, SHADOW.switch_port: copies})

    def test_damage_stays(self) -> None:
        """a damaged segment has a copy whose checksum has the same error"""
        self.protect(SHADOW)
        frame = bytearray(TAGGED.frame())
        frame[-20] ^= 0x40
        damaged = replace(TAGGED, payload=bytes(frame[-len(TAGGED.payload) :]))
        damaged_packet, right = Ether(bytes(frame)), Ether(damaged.frame())
        copy = copy_packet(damaged, SHADOW, 0)
        right_copy = Ether(bytes(copy))[TCP].chksum
        # Ones' complement (RFC 1071): the error is the difference of the sums; pseudo headers cancel out.
        copy[TCP].chksum = (right_copy + damaged_packet[TCP].chksum - right[TCP].chksum) % 0xFFFF
        self.assertNotEqual(right_copy, copy[TCP].chksum)
        self.check((TRAINER_PORT, bytes(frame)), {PEER_PORT: bytes(frame), SHADOW.switch_port: bytes(copy)})

    def test_damage_anywhere(self) -> None:
        """a flipped bit in any field of the TCP header, the options or the payload stays detectable"""
        self.protect(SHADOW)
        whole = tagged_segment(tag(sequence=99, anchor=55), timestamps=True, payload=payload(60)).frame()
        tcp = 34
        fields = {
            "ports": (0, 3), "sequence": (4, 7), "acknowledgement": (8, 11), "flags": (13, 13),
            "window": (14, 15), "checksum": (16, 17), "urgent pointer": (18, 19),
            "timestamps": (24, 31), "tag's sequence": (36, 39), "tag's anchor": (40, 43),
            "payload": (48, 107),
        }  # fmt: skip
        for name, ends in fields.items():
            for place in ends:
                with self.subTest(name, place=place):
                    frame = bytearray(whole)
                    frame[tcp + place] ^= 0x08
                    copy = self._copy_of(bytes(frame))
                    self.assertNotEqual(_recompute(copy)[TCP].chksum, copy[TCP].chksum)

    def test_damaged_ip_header(self) -> None:
        """a flipped bit in the IP header stays detectable in the copy's header checksum"""
        self.protect(SHADOW)
        for place in (15, 18, 20, 22, 24, 25):  # ECN, identification, DF, TTL, checksum
            with self.subTest(place=place):
                frame = bytearray(TAGGED.frame())
                frame[place] ^= 0x02 if place != 20 else 0x40
                copy = self._copy_of(bytes(frame))
                self.assertNotEqual(_recompute(copy)[IP].chksum, copy[IP].chksum)

    def _copy_of(self, frame: bytes) -> Ether:
        outputs, _ = self.exchange(TRAINER_PORT, [frame])
        self.assertEqual([frame], outputs[PEER_PORT])
        (copy,) = outputs[SHADOW.switch_port]
        return Ether(copy)


def _recompute(packet: Ether) -> Ether:
    again = packet.copy()
    del again[IP].chksum, again[TCP].chksum
    return Ether(bytes(again))
