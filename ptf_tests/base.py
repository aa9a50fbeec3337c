"""Base of all tests: a switch with only the test's entries, and fences.

A test cannot wait for a frame that must *not* be sent. So each exchange ends with fence frames, which follow
the test's own frames through every queue: no frame can arrive at a port after its fence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address
from typing import ClassVar

import ptf
from ptf.base_tests import BaseTest
from ptf.testutils import dp_poll, send_packet, verify_no_other_packets
from scapy.layers.l2 import ARP, Ether

from controlplane.entities import Entity, Holdings, MulticastGroup, TableEntry, Update
from controlplane.forwarding import flood_group, forward
from controlplane.replication import enter, mark, replicate
from controlplane.streams import rewrite
from controlplane.stub import punt
from ptf_tests.packets import (
    BOUNDARY,
    BROADCAST,
    DSCP_BIT,
    PEER_IP,
    PEER_MAC,
    PEER_PORT,
    PORTS,
    STUB,
    TRAINER_IP,
    TRAINER_PORT,
    Shadow,
    TaggedSegment,
    compare,
    expected_copy,
    stream_key,
)
from ptf_tests.stage.lab import SwitchStage
from ptf_tests.switch import CounterValue, PtfSwitch, PuntedFrame

FENCE_SOURCE = IPv4Address("192.0.2.1")
"""Sender of every fence. Tests that refuse or limit others must let it pass."""
_FENCE_IP = IPv4Address("192.0.2.254")
_FENCE_SECONDS = 5.0
_MODEL_FENCE_SECONDS = 60.0
"""A chip's model on a busy machine takes this long."""
_SHORTEST = 60
"""Bytes of Ethernet's shortest frame, without its frame check sequence."""
_BURST = 16
"""Frames between two fences: BMv2's egress queues of 64 packets overflow silently."""
_numbers = itertools.count(1)


class SwitchTest(BaseTest):  # type: ignore[misc]
    """A test with one switch, which starts with a flood group of all ports."""

    lab: ClassVar[SwitchStage]
    switch: ClassVar[PtfSwitch]

    def setUp(self) -> None:
        super().setUp()
        self.dataplane = ptf.dataplane_instance
        self.dataplane.flush()
        self.addCleanup(self.switch.reconcile, Holdings())
        arp_fence = punt(_FENCE_IP)[1]
        self.switch.put([flood_group(set(PORTS)), arp_fence])

    @property
    def patience(self) -> float:
        """The seconds that a frame may take."""
        return _MODEL_FENCE_SECONDS if self.lab.hardware else _FENCE_SECONDS

    def put(self, *entities: Entity) -> None:
        """Insert entities."""
        self.switch.put(entities)

    def drop(self, *entities: Entity) -> None:
        """Delete entities."""
        self.switch.write(Update(entity, None) for entity in entities)

    def change(self, old: Entity, new: Entity) -> None:
        """Modify an entity."""
        self.switch.write([Update(old, new)])

    def check(
        self,
        stimulus: tuple[int, bytes | Sequence[bytes]],
        out: Mapping[int, bytes | Sequence[bytes]],
        punted: Sequence[PuntedFrame] = (),
    ) -> None:
        """Send frames into a port; check that exactly `out` is sent, byte for byte, and `punted` punted."""
        port, frames = stimulus
        outputs, packet_ins = self.exchange(port, _frame_list(frames))
        for where in PORTS:
            wrong = compare(self._normalize(_frame_list(out.get(where, ()))), self._normalize(outputs[where]))
            if wrong:
                self.fail(f"port {where}: {wrong}")
        self.assertEqual(
            [(packet.ingress_port, *self._normalize([packet.frame])) for packet in punted],
            [(packet.ingress_port, *self._normalize([packet.frame])) for packet in packet_ins],
            "frames punted to the controller",
        )

    def _normalize(self, frames: Sequence[bytes]) -> list[bytes]:
        """Return the comparable part of frames: hardware may pad short ones."""
        return [frame.ljust(_SHORTEST, b"\0") if self.lab.hardware else frame for frame in frames]

    def exchange(
        self, port: int, frames: Sequence[bytes]
    ) -> tuple[dict[int, list[bytes]], list[PuntedFrame]]:
        """Send frames into a port, and return all outputs: by port, and to the controller."""
        outputs: dict[int, list[bytes]] = {where: [] for where in PORTS}
        punted: list[PuntedFrame] = []
        for start in range(0, max(len(frames), 1), _BURST):
            for frame in frames[start : start + _BURST]:
                send_packet(self, port, frame)
            burst_outputs, packet_ins = self.drain(port)
            for where in PORTS:
                outputs[where] += burst_outputs[where]
            punted += packet_ins
        return outputs, punted

    def drain(self, port: int) -> tuple[dict[int, list[bytes]], list[PuntedFrame]]:
        """Return all outputs of the frames sent into `port` before."""
        outputs: dict[int, list[bytes]] = {where: [] for where in PORTS}
        # Flooding omits the ingress port of a fence, so a second fence enters by another port.
        for origin in (port, PORTS[0] if port != PORTS[0] else PORTS[1]):
            fence = _fence(BROADCAST, IPv4Address(f"198.51.100.{next(_numbers) % 250}"))
            send_packet(self, origin, fence)
            for where in PORTS:
                if where != origin:
                    outputs[where] += self._until(where, fence)
        packet_ins = self._punted_before_fence(port)
        verify_no_other_packets(self)
        return outputs, packet_ins

    def _until(self, port: int, fence: bytes) -> list[bytes]:
        frames: list[bytes] = []
        while True:
            result = dp_poll(self, port_number=port, timeout=self.patience)
            if isinstance(result, self.dataplane.PollFailure):
                self.fail(f"port {port}: no fence frame; the switch has stopped or does not flood")
            if result.packet == fence:
                return frames
            frames.append(result.packet)

    def _punted_before_fence(self, port: int) -> list[PuntedFrame]:
        frames: list[PuntedFrame] = []
        fence = _fence(BROADCAST, _FENCE_IP)
        send_packet(self, port, fence)
        while True:
            punted = self.switch.next_punted(self.patience)
            if punted is None:
                raise self.failureException("no fence frame by packet-in; the switch does not punt")
            if punted.frame == fence:
                return frames
            frames.append(punted)

    def check_packet_out(self, port: int, frame: bytes) -> None:
        """Send a frame by packet-out; check that it leaves `port` unchanged, and no other port."""
        self.switch.packet_out(port, frame)
        result = dp_poll(self, port_number=port, timeout=self.patience)
        self.assertIsInstance(result, self.dataplane.PollSuccess, f"port {port} sent nothing")
        wrong = compare(self._normalize([frame]), self._normalize([result.packet]))
        self.assertEqual("", wrong, f"port {port}: {wrong}")
        self.check((PORTS[0], ()), {})

    @contextmanager
    def counts(self, counter: str, *increments: CounterValue) -> Iterator[None]:
        """Check that the block adds exactly this to the cells of an indexed counter."""
        before = self.switch.counts(counter)
        yield
        after = self.switch.counts(counter)
        grown = [now - then for now, then in zip(after, before, strict=True)]
        self._check_counts(increments, grown, f"counter {counter}")

    def check_count(self, entry: TableEntry, *frames: bytes) -> None:
        """Check that an entry's direct counter has counted exactly these frames."""
        self._check_counts([count(*frames)], [self.switch.direct_count(entry)], str(entry))

    def _check_counts(
        self, expected: Sequence[CounterValue], actual: Sequence[CounterValue], label: str
    ) -> None:
        """Compare counters; only packets on a chip, whose bytes are not those of the frame."""
        if self.lab.hardware:
            packets = [[count.packets for count in counts] for counts in (expected, actual)]
            self.assertEqual(*packets, label)
        else:
            self.assertEqual(list(expected), list(actual), label)


ENTER = enter(TRAINER_PORT, TRAINER_IP, PEER_IP, boundary=BOUNDARY)


class TaggedTest(SwitchTest):
    """A test with a boundary rank at `TRAINER_PORT` that sends tagged segments to the rank at `PEER_PORT`."""

    def setUp(self) -> None:
        super().setUp()
        self.put(mark(DSCP_BIT), forward(PEER_MAC, PEER_PORT), ENTER)

    def replicate(self, *shadows: Shadow, shadow_id: int = 0, channel: int = 0, group: int = 2) -> TableEntry:
        """Replicate to these holders, starting with holder 1, without connecting their streams."""
        copies = {(shadow.switch_port, holder) for holder, shadow in enumerate(shadows, 1)}
        entry = replicate(BOUNDARY, shadow_id, channel, group=group)
        self.put(MulticastGroup(group, frozenset({(PEER_PORT, 0), *copies})), entry)
        return entry

    def connect(
        self, shadow: Shadow, *, holder: int = 1, shadow_id: int = 0, channel: int = 0, incarnation: int = 1
    ) -> TableEntry:
        """Connect a stream."""
        key = stream_key(shadow_id, channel, holder)
        entry = rewrite(key, incarnation, shadow.connection(), STUB)
        self.put(entry)
        return entry

    def protect(self, *shadows: Shadow, shadow_id: int = 0, channel: int = 0, group: int = 2) -> TableEntry:
        """Replicate to these holders, connected in incarnation 1; return the entry of `replication`."""
        for holder, shadow in enumerate(shadows, 1):
            self.connect(shadow, holder=holder, shadow_id=shadow_id, channel=channel)
        return self.replicate(*shadows, shadow_id=shadow_id, channel=channel, group=group)


class StreamTest(TaggedTest):
    """A test of shadow copies, beside the training copy."""

    def check_copy(self, segment: TaggedSegment, shadow: Shadow, sequence: int) -> None:
        """Check that the training copy is unchanged, and the shadow copy is at `sequence` of the stream."""
        self.check_copies(segment, {shadow: sequence})

    def check_copies(self, segment: TaggedSegment, sequences: dict[Shadow, int]) -> None:
        copies = {s.switch_port: expected_copy(segment, s, at) for s, at in sequences.items()}
        self.check((TRAINER_PORT, segment.frame()), {PEER_PORT: segment.frame(), **copies})


def count(*frames: bytes) -> CounterValue:
    """Return a counter's value for frames, each with its received length."""
    return CounterValue(len(frames), sum(len(frame) for frame in frames))


def _frame_list(frames: bytes | Sequence[bytes]) -> list[bytes]:
    return [frames] if isinstance(frames, bytes) else list(frames)


def _fence(to: str, target: IPv4Address) -> bytes:
    number = next(_numbers)
    mac = (
        f"06:00:{number >> 24 & 255:02x}:{number >> 16 & 255:02x}:{number >> 8 & 255:02x}:{number & 255:02x}"
    )
    fence = Ether(dst=to, src=mac) / ARP(op=1, hwsrc=mac, psrc=str(FENCE_SOURCE), pdst=str(target))
    return bytes(fence).ljust(_SHORTEST, b"\0")
