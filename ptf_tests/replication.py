"""Feature `replication`: the group of tagged segments by port, addresses, shadow id and channel."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address

from controlplane.entities import MulticastGroup, TableEntry
from controlplane.replication import enter, mark, replicate
from controlplane.streams import rewrite
from ptf_tests.base import TaggedTest, count
from ptf_tests.not_replicated import Passed
from ptf_tests.packets import (
    BOUNDARY,
    PEER_IP,
    PEER_PORT,
    STUB,
    TRAINER_PORT,
    Shadow,
    TaggedSegment,
    expected_copy,
    payload,
    tag,
    tagged_segment,
)
from ptf_tests.switch import CounterValue

__all__ = ["Groups", "Passed", "Replicated"]

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
        sent = replace(segment, sequence=0).frame()
        copy = expected_copy(segment, SHADOW, sequence=5000)
        with self.counts("passed", CounterValue(), CounterValue()):
            self.check((TRAINER_PORT, sent), {PEER_PORT: sent, SHADOW.switch_port: copy})
        self.check_count(entry, sent)

    def test_forged(self) -> None:
        """the rank's addresses at another port: forwarded and counted, but not replicated"""
        entry = self.protect(SHADOW)
        sent = replace(TAGGED, sequence=0).frame()
        for port in (9, SHADOW.switch_port):
            with self.counts("passed", CounterValue(), count(sent)):
                self.check((port, sent), {PEER_PORT: sent})
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
        sent: list[bytes] = []
        out: dict[int, list[bytes]] = {PEER_PORT: sent}
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
                sent.append(segment.frame())
                for shadow in (first, second):
                    copy = expected_copy(segment, shadow, sequence=stream)
                    out.setdefault(shadow.switch_port, []).append(copy)
        self.check((TRAINER_PORT, sent), out)
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
        other = Shadow(0, isn=77)
        source = IPv4Address("10.0.0.7")
        self.protect(SHADOW)
        self.put(
            enter(TRAINER_PORT, source, PEER_IP, boundary=BOUNDARY + 1),
            replicate(BOUNDARY + 1, 0, 0, group=2),
            rewrite((BOUNDARY + 1, 0, 0, 1), 1, other.connection(), STUB),
        )
        first, second = replace(TAGGED, sequence=0), replace(TAGGED, sequence=0, source=source)
        self.check(
            (TRAINER_PORT, [first.frame(), second.frame()]),
            {
                PEER_PORT: [first.frame(), second.frame()],
                SHADOW.switch_port: [
                    expected_copy(first, SHADOW, sequence=5000),
                    expected_copy(second, other, sequence=5000),
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
        received, punted = self.exchange(TRAINER_PORT, [segment.frame()])
        copies = [expected_copy(segment, shadow, sequence=5000) for shadow in (first, second)]
        # The order of a group's copies at one port depends on the target.
        self.assertEqual(sorted([segment.frame(), *copies]), sorted(received.pop(PEER_PORT)))
        self.assertEqual([], punted)
        self.assertFalse(any(received.values()), received)
