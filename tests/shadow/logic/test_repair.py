"""Simulation: streams whose frames get lost come whole, in bounded traffic, while the rank keeps the bytes.

A rank sends an iteration at a time in frames, of which some do not arrive, nor do some of what it sends
again. The node's kernel delivers nothing behind a hole, and keeps what fits into its window.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.hold import Hold, StreamState
from checkmate.shadow.logic.records import Records
from checkmate.shadow.logic.repair import FIRST_BYTES, PAUSE_SECONDS, StreamRepair
from checkmate.shadow.receive.hold_plans import SETS, HoldPlan, StreamPlan
from checkmate.wire.repair import (
    COMPARED_BYTES,
    MAX_BYTES,
    SENT_BYTES,
    SENT_ITERATIONS,
    RepairRequest,
    SentStream,
    SentStreams,
    digest_of,
)
from checkmate.wire.schedule import StreamLayout

POLL = 0.05
FRAME = 1 << 10
GRACE = 2.0


@dataclass
class SimulatedKernel:
    """A receiving socket: bytes behind a hole wait, up to a window behind the next byte in order."""

    window: int
    position: int = 0
    data: bytearray = field(default_factory=bytearray)
    behind: dict[int, bytes] = field(default_factory=dict)

    def arrive(self, start: int, frame: bytes) -> None:
        if start + len(frame) <= self.position or start + len(frame) > self.position + self.window:
            return
        self.behind[start] = frame
        while ready := [s for s, f in self.behind.items() if s <= self.position]:
            for begin in ready:
                f = self.behind.pop(begin)
                rest = f[max(0, self.position - begin) :]
                self.data += rest
                self.position += len(rest)


class SimulatedTraining:
    """A rank, and a node for each of its streams' shards, which step together, and ask at each poll."""

    def __init__(
        self,
        nbytes: int,
        loss: float,
        *,
        seed: int,
        window: int = 64 << 20,
        period: float = 0.2,
        shards: int = 1,
    ) -> None:
        self.nbytes, self.loss, self.period = nbytes, loss, period
        self.random = random.Random(seed)
        self.sent = SentStreams({(0, shard): nbytes for shard in range(shards)}, 0)
        self.nodes = [SimulatedNode(shard, nbytes, window) for shard in range(shards)]
        self.sent_again = self.late = 0
        self.gap: str | None = None
        self.now = 0.0

    @property
    def in_full(self) -> int:
        """The last iteration that all nodes have."""
        return min(node.hold.in_full for node in self.nodes)

    def transmit(self, node: SimulatedNode, start: int, data: bytes) -> None:
        for offset in range(0, len(data), FRAME):
            if self.random.random() >= self.loss:
                node.kernel.arrive(start + offset, data[offset : offset + FRAME])

    def iterate(self, iteration: int) -> None:
        """Send an iteration's bytes to all nodes, and poll them until the next one."""
        until = self.now + self.period
        for node in self.nodes:
            data = self.random.randbytes(self.nbytes)
            self.sent.add((0, node.shard), memoryview(data))
            self.transmit(node, len(node.history), data)
            node.history += data
            part = pb.RecordPart(iteration=iteration)
            part.ends.add(shard=node.shard, end=len(node.history))
            node.records.add(part, self.now)
        oldest = self.sent.oldest
        assert oldest is not None
        for node in self.nodes:
            node.records.repairs_from[0] = oldest
        while self.now < until and self.gap is None:
            self.poll()
        self.late += self.in_full < iteration - 1

    def finish(self, seconds: float = 3.0) -> None:
        """Poll without further iterations."""
        until = self.now + seconds
        while self.now < until and self.gap is None:
            self.poll()

    def poll(self) -> None:
        self.now += POLL
        for node in self.nodes:
            node.observe()
            for missing in node.hold.missing_ranges(node.records, 0, self.now):
                self.answer(node, missing)
            node.observe()
            node.hold.update(node.records)
        for node in self.nodes:
            node.hold.released = self.in_full
            self.gap = self.gap or node.hold.gap(node.records, self.now, GRACE)

    def answer(self, node: SimulatedNode, missing: pb.MissingRange) -> None:
        request = RepairRequest(missing.start, missing.missing, missing.stop)
        assert request.is_sound
        data = self.sent.read((0, node.shard), request.start, request.stop)
        if data is None or self.random.random() < self.loss:
            return
        self.sent_again += request.stop - request.missing
        self.transmit(node, request.missing, data[request.missing - request.start :])
        node.observe()
        repaired = pb.RepairedRange(
            shard=node.shard, start=request.start, stop=request.stop, digest=digest_of(data)
        )
        if node.hold.awaits_digest(0, repaired):
            came = digest_of(node.kernel.data[request.start : request.stop])
            node.hold.note_repaired(0, repaired, is_equal=came == repaired.digest)


class SimulatedNode:
    """A node with one stream of one shard. It reads what there are buckets for."""

    def __init__(self, shard: int, nbytes: int, window: int) -> None:
        plan = StreamPlan(0, shard, 0, 0)
        self.shard, self.nbytes = shard, nbytes
        self.kernel = SimulatedKernel(window)
        self.stream = StreamState(plan, StreamLayout((), (), nbytes), connected=True, repair=StreamRepair())
        self.hold = Hold(HoldPlan(0, shard, (), (plan,)), [], [self.stream], 0, 0)
        self.hold.live = True
        self.records = Records(1, 0)
        self.history = bytearray()

    def observe(self) -> None:
        room = (self.hold.released + SETS + 1) * self.nbytes
        position = min(self.kernel.position, room)
        self.stream.observe(position, position, connected=True, paused=position == room, queued=0)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))]
)
@pytest.mark.parametrize("holes", [0.1, 1, 10])
def test_all_comes_whole(holes: float, seed: int) -> None:
    """With up to ten lost frames in an iteration of each stream, and repairs that are lost as often."""
    training = SimulatedTraining(200 * FRAME + 17, holes / 200, seed=seed, shards=2)
    for iteration in range(100):
        training.iterate(iteration)
    training.finish()
    assert training.gap is None
    assert training.in_full == 99
    for node in training.nodes:
        assert node.kernel.data == node.history
    assert training.sent_again < 3 * sum(len(node.history) for node in training.nodes)
    if holes <= 1:
        assert training.late <= 10


def test_nothing_is_asked_without_losses() -> None:
    training = SimulatedTraining(100 * FRAME, 0.0, seed=0)
    for iteration in range(20):
        training.iterate(iteration)
    assert not training.sent_again and not training.nodes[0].hold.streams[0].repair.requested  # type: ignore[union-attr]


def test_a_window_that_is_full_is_repaired_too() -> None:
    """What is beyond the window is lost as well, and asked for in larger and larger pieces."""
    training = SimulatedTraining(1000 * FRAME, 0.001, seed=3, window=100 * FRAME, period=1.0)
    for iteration in range(20):
        training.iterate(iteration)
    assert training.gap is None
    assert training.in_full >= 18
    (node,) = training.nodes
    assert node.kernel.data == node.history[: node.kernel.position]


def test_what_nobody_has_any_more_is_a_gap() -> None:
    training = SimulatedTraining(100 * FRAME, 0.0, seed=0)
    training.loss = 1.0
    iteration = 0
    while training.gap is None and iteration < 100:
        training.iterate(iteration)
        iteration += 1
    assert training.gap is not None
    assert "asked for again, and not repaired" in training.gap or "have them any more" in training.gap


def test_wrong_bytes_are_a_gap() -> None:
    """The rank's memory is not what it has sent: what came before the hole shows that."""
    training = SimulatedTraining(100 * FRAME, 0.05, seed=1)
    read = training.sent.read
    training.sent.read = lambda stream, start, stop: read(stream, start + 1, stop + 1)  # type: ignore[method-assign]
    for iteration in range(20):
        training.iterate(iteration)
        if training.gap is not None:
            break
    assert training.gap is not None and "differs" in training.gap


def test_a_request_is_repeated_more_and_more_rarely() -> None:
    repair = StreamRepair()
    asked = [t / 100 for t in range(1000) if repair.request(0, 10 * FRAME, t / 100, t / 100, 1 << 40)]
    pauses = [round(later - earlier, 1) for earlier, later in itertools.pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[0] >= PAUSE_SECONDS[0] and pauses[-1] <= PAUSE_SECONDS[1] + 0.011
    assert repair.fault(10.0, 5.0) and not repair.fault(4.0, 5.0)


def test_each_further_hole_of_an_iteration_doubles_the_request() -> None:
    repair, position, sizes = StreamRepair(), 0, list[int]()
    nbytes = 1 << 30
    while len(sizes) < 12:
        request = repair.request(position, 1 << 40, 1.0, 0.0, nbytes)
        assert request is not None
        sizes.append(request.stop - request.missing)
        assert repair.checked(request.stop + 5) <= position
        assert repair.awaits(request.start, request.stop, request.stop)
        repair.note(request.start, request.stop, request.stop - 1, is_equal=False)  # not all have come yet
        repair.note(request.start, request.stop, request.stop, is_equal=True)
        position = request.stop
    assert sizes == [min(FIRST_BYTES << n, MAX_BYTES) for n in range(12)]
    assert repair.request(1 << 30, 1 << 40, 0.01, 0.0, nbytes) is None  # it stands too shortly
    request = repair.request(1 << 30, 1 << 40, 1.0, 0.0, nbytes)
    assert request is not None and request.stop == (1 << 30) + FIRST_BYTES


def test_what_is_kept_is_bounded_and_read_as_it_was() -> None:
    stream = SentStream(20 << 20, 5)
    data = [bytes([n]) * (20 << 20) for n in range(SENT_ITERATIONS + 2)]
    for iteration in data:
        for start in range(0, len(iteration), 3 << 20):
            stream.add(memoryview(iteration)[start : start + (3 << 20)])
    assert stream.oldest == 5 + 2
    edge = 3 * (20 << 20)
    assert stream.read(edge - 3, edge + 2) == b"\x02" * 3 + b"\x03" * 2
    assert stream.read(2 * (20 << 20) - 1, 2 * (20 << 20)) is None  # dropped
    end = len(data) * (20 << 20)
    assert stream.read(end - 1, end + 1) is None  # not sent yet


def test_of_small_iterations_more_are_kept() -> None:
    stream = SentStream(1 << 20, 0)
    for n in range(100):
        stream.add(memoryview(bytes([n]) * (1 << 20)))
    assert stream.oldest == 100 - SENT_BYTES // (1 << 20)


@pytest.mark.parametrize(
    "numbers", [(0, 0, 0), (5, 4, 6), (0, 0, MAX_BYTES + COMPARED_BYTES + 1), (-1, 0, 5), (0, 7, 6)]
)
def test_requests_that_are_not_sound(numbers: tuple[int, int, int]) -> None:
    assert not RepairRequest(*numbers).is_sound
