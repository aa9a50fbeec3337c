"""Simulation: a node that waits for another one has room for that, so it never causes a gap itself.

A trainer puts a part into the queue to each node with every iteration, and leaves one out if the queue is too
full, as `part_stream` does. Nodes read at the speed of their link, step what is committed, and may stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from checkmate.shadow.logic.commit import Committee, Progress
from checkmate.shadow.logic.hold import StreamState
from checkmate.shadow.logic.room import Room, SocketRoom, TrainerRoom
from checkmate.shadow.receive.hold_plans import SETS, StreamPlan
from checkmate.wire.copies import has_no_room, kept_seconds
from checkmate.wire.schedule import StreamLayout

TICK = 0.1
HEARTBEAT = 0.25


@dataclass
class SimulatedQueue:
    """A trainer's parts for a node: iteration, and when it had them."""

    nbytes: int
    parts: deque[tuple[int, float]] = field(default_factory=deque)
    left_out: list[int] = field(default_factory=list)

    def put(self, iteration: int, now: float) -> None:
        age = now - self.parts[0][1] if self.parts else 0.0
        if has_no_room(len(self.parts), self.nbytes, age):
            self.left_out.append(iteration)
        else:
            self.parts.append((iteration, now))


class SimulatedReceiver:
    """A node with one live hold and one stream, which reads at a `rate` (bytes per second)."""

    def __init__(self, number: int, nodes: int, nbytes: int, rate: float, room: Room) -> None:
        self.number, self.nbytes, self.rate = number, nbytes, rate
        self.queue = SimulatedQueue(nbytes)
        self.room = room
        self.stream = StreamState(StreamPlan(0, number, 0, 0), StreamLayout((), (), nbytes), connected=True)
        self.view = Committee(number, range(nodes), 0, 0.0, passes_laggards=room.passes_laggards)
        self.now = 0.0
        self.in_full = self.released = -1
        self.is_stopped = self.is_dead = False
        self.turn = 0.0
        self._read = 0.0
        self._ticked = 0.0
        self._before: tuple[int, float] | None = None

    @property
    def is_full(self) -> bool:
        return self.in_full >= self.released + SETS

    def read(self, now: float) -> None:
        budget = self.rate * self.turn
        while self.queue.parts and not self.is_full and budget > 0:
            count = min(budget, self.nbytes - self._read)
            self._read, budget = self._read + count, budget - count
            if self._read == self.nbytes:
                self._read = 0
                self.in_full = self.queue.parts.popleft()[0]
        head = self.queue.parts[0] if self.queue.parts else None
        if head is not None:
            if self._before is not None and head[0] > self._before[0]:
                self.stream.period = (head[1] - self._before[1]) / (head[0] - self._before[0])
            self._before = head
        self.stream.waited = 0.0 if head is None else now - head[1]
        self.stream.queued = min(4 << 20, len(self.queue.parts) * self.nbytes)
        self.stream.received_bytes = int(self.nbytes * (self.in_full + 1) + self._read)

    def act(self, now: float) -> None:
        """Do what a node does in a turn."""
        self.now += self.turn  # a node's clock stands while it is stopped
        self.read(now)
        if self.now - self._ticked >= TICK:
            self._ticked = self.now
            self.room.measure([self.stream], self.now)
        self.view.report(
            Progress(
                incarnation=0,
                in_full=self.in_full,
                stepped=self.released,
                live=True,
                patience=self.room.seconds,
                shards=frozenset([(0, self.number)]),
                pressed=self.is_full and self.room.is_short([self.stream]),
            )
        )
        self.view.decide(self.now)
        if self.released < min(self.in_full, self.view.committed):
            self.released += 1

    def hear(self, peer: SimulatedReceiver) -> None:
        if peer.number > self.number:
            self.view.hear_report(peer.number, replace(peer.view.progress), self.now)
        else:
            progress = peer.view.progress
            decision = (peer.view.committed, peer.view.active)
            self.view.hear_decision(peer.number, *decision, self.now, (), progress.shards, progress.patience)


@dataclass(frozen=True)
class Load:
    """A training: seconds between iterations, and bytes of each part."""

    period: float
    nbytes: int

    def __str__(self) -> str:
        return f"{self.period:g} s, {self.nbytes:,} bytes"


def play(
    load: Load,
    seconds: float,
    disturb: Callable[[list[SimulatedReceiver], float], None],
    make_room: Callable[[], Room] = TrainerRoom,
    nodes: int = 3,
) -> list[SimulatedReceiver]:
    """Simulate a training on links that are twice as fast as it needs."""
    rate = 2 * load.nbytes / load.period
    receivers = [SimulatedReceiver(number, nodes, load.nbytes, rate, make_room()) for number in range(nodes)]
    step = max(0.01, load.period / 100)  # messages take that
    iteration, turn, beaten = 0, 0, 0.0
    for receiver in receivers:
        receiver.turn = step
    while (now := turn * step) < seconds:
        turn += 1
        while iteration * load.period <= now:
            for receiver in receivers:
                receiver.queue.put(iteration, now)
            iteration += 1
        disturb(receivers, now)
        running = [receiver for receiver in receivers if not (receiver.is_stopped or receiver.is_dead)]
        for receiver in running:
            receiver.act(now)
        beats = now - beaten >= HEARTBEAT
        beaten = now if beats else beaten
        for receiver in running:
            for peer in running:
                decider = receiver.number < peer.number or peer.view.progress.live
                if peer is not receiver and (beats or decider):
                    receiver.hear(peer)
    return receivers


LOADS = [Load(period, nbytes) for period in (0.02, 0.3, 4.0) for nbytes in (100_000, 20_000_000, 500_000_000)]


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_nodes_that_wait_for_a_stopped_one_lose_nothing(load: Load, number: int) -> None:
    """Whichever stops, the decider included, for a moment or for good."""
    start = 20 * load.period + 1.0
    for stop in (0.6, 1.5, 30.0):

        def disturb(receivers: list[SimulatedReceiver], now: float, stop: float = stop) -> None:
            receivers[number].is_stopped = start <= now < start + stop

        receivers = play(load, start + stop + 10 * load.period, disturb)
        for receiver in receivers:
            if receiver.number != number:
                assert receiver.queue.left_out == [], f"node {receiver.number}, stop of {stop} s"
        short = 0.5 * kept_seconds(load.nbytes, load.period)
        if stop < short:  # the trainer's room holds that, too
            assert receivers[number].queue.left_out == []


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("share", [0.9, 0.3, 0.01])
def test_nodes_that_wait_for_a_slow_one_lose_nothing(load: Load, number: int, share: float) -> None:
    """The slow one is live and heard: it cannot tell that it will lose gradients."""

    def disturb(receivers: list[SimulatedReceiver], now: float) -> None:
        receivers[number].rate = share * load.nbytes / load.period

    seconds = 60 * load.period + 4.0
    receivers = play(load, seconds, disturb)
    has_room = kept_seconds(load.nbytes, load.period) > seconds / 4
    for receiver in receivers:
        if receiver.number != number:
            assert receiver.queue.left_out == [], f"node {receiver.number}"
            assert has_room or receiver.released > 40
    if share == 0.01 and not has_room:
        assert receivers[number].queue.left_out, "it has too little room"


def test_the_room_of_sockets_would_not_do() -> None:
    """So the simulation shows losses, if nodes wait for as long as sockets of 4 MB seem to last."""

    def disturb(receivers: list[SimulatedReceiver], now: float) -> None:
        receivers[0].rate = 0.01 * 20_000_000 / 0.1

    receivers = play(Load(0.1, 20_000_000), 30.0, disturb, lambda: SocketRoom(0.0, 4 << 20))
    assert all(receiver.queue.left_out for receiver in receivers)


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_without_a_disturbance_all_step_together(load: Load) -> None:
    receivers = play(load, 40 * load.period + 2.0, lambda receivers, now: None)
    assert [receiver.queue.left_out for receiver in receivers] == [[], [], []]
    assert len({receiver.released for receiver in receivers}) <= 2
    assert min(receiver.released for receiver in receivers) > 35
