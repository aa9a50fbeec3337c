"""Suite `streams`: checksums of shadow copies, also of damaged segments."""

from __future__ import annotations

from dataclasses import replace

from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether

from ptf_tests.base import StreamTest
from ptf_tests.packets import (
    PEER_PORT,
    TRAINER_PORT,
    Shadow,
    copy_packet,
    expected_copy,
    payload,
    tag,
    tagged_segment,
)

SHADOW = Shadow(0)
TAGGED = tagged_segment(tag(), sequence=0, payload=payload(200))
TOP = 2**32


class Checksums(StreamTest):
    def test_zero(self) -> None:
        """checksums that are zero, in the copy or in the original"""
        self.protect(SHADOW)
        fields = {"payload": payload(198) + bytes(2), "identification": 0}
        plain = replace(TAGGED, **fields)  # type: ignore[arg-type]
        for packet in (plain.packet(), copy_packet(plain, SHADOW, 0)):
            built = Ether(bytes(packet))
            # A word with the value of the checksum without it makes the checksum zero.
            segment = replace(
                plain,
                payload=payload(198) + built[TCP].chksum.to_bytes(2, "big"),
                identification=built[IP].chksum,
            )
            both = Ether(segment.frame()), Ether(expected_copy(segment, SHADOW, 0))
            self.assertIn((0, 0), [(each[IP].chksum, each[TCP].chksum) for each in both])
            self.check_copy(segment, SHADOW, 0)

    def test_many(self) -> None:
        """checksums are correct for 64 segments that differ in every field"""
        self.protect(SHADOW)
        sent, copies = [], []
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
            sent.append(segment.frame())
            copies.append(expected_copy(segment, SHADOW, (mixed + mixed * 5 - mixed * 3) % TOP))
        self.check((TRAINER_PORT, sent), {PEER_PORT: sent, SHADOW.switch_port: copies})

    def test_damage_stays(self) -> None:
        """a damaged segment has a copy whose checksum has the same error"""
        self.protect(SHADOW)
        frame = bytearray(TAGGED.frame())
        frame[-20] ^= 0x40
        damaged = replace(TAGGED, payload=bytes(frame[-len(TAGGED.payload) :]))
        sent, right = Ether(bytes(frame)), Ether(damaged.frame())
        copy = copy_packet(damaged, SHADOW, 0)
        right_copy = Ether(bytes(copy))[TCP].chksum
        # Ones' complement (RFC 1071): the error is the difference of the sums; pseudo headers cancel out.
        copy[TCP].chksum = (right_copy + sent[TCP].chksum - right[TCP].chksum) % 0xFFFF
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
                    self.assertNotEqual(_recomputed(copy)[TCP].chksum, copy[TCP].chksum)

    def test_damaged_ip_header(self) -> None:
        """a flipped bit in the IP header stays detectable in the copy's header checksum"""
        self.protect(SHADOW)
        for place in (15, 18, 20, 22, 24, 25):  # ECN, identification, DF, TTL, checksum
            with self.subTest(place=place):
                frame = bytearray(TAGGED.frame())
                frame[place] ^= 0x02 if place != 20 else 0x40
                copy = self._copy_of(bytes(frame))
                self.assertNotEqual(_recomputed(copy)[IP].chksum, copy[IP].chksum)

    def _copy_of(self, frame: bytes) -> Ether:
        received, _ = self.exchange(TRAINER_PORT, [frame])
        self.assertEqual([frame], received[PEER_PORT])
        (copy,) = received[SHADOW.switch_port]
        return Ether(copy)


def _recomputed(packet: Ether) -> Ether:
    again = packet.copy()
    del again[IP].chksum, again[TCP].chksum
    return Ether(bytes(again))
