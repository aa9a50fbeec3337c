"""Complete nodes without threads, sockets and tensors, with any stalls and any order of messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.job.schema import Job
from checkmate.nodes.target import Target, find_target
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.calls.begin import hold_status
from checkmate.shadow.clock import STALL
from checkmate.shadow.logic.announcements import LagWatch
from checkmate.shadow.logic.effects import DueStep, Empty, Join, Log
from checkmate.shadow.logic.group import ShadowGroup
from checkmate.shadow.logic.hold import AHEAD, Hold, HoldSnapshot, Stepped, StreamState
from checkmate.shadow.logic.node_state import MAX_DOUBTS, NodeState
from checkmate.shadow.logic.records import Records
from checkmate.shadow.logic.starts import SILENT_SECONDS, StartEnded
from checkmate.shadow.receive.hold_plans import SETS, hold_plans
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.schedule import stream_layout
from testbed.copies import local_job

RANKS = 2
BUFFER = 8
"""Number of iterations in a socket's buffer."""


def laid_out(job: Job) -> Layout:
    return make_layout([Parameter(f"p{i}", (8,), "float32") for i in range(6)], job.shards(0), 64)


class SimulatedNode:
    """A node's state, with data in transit to it: gradients, records and messages of other nodes."""

    def __init__(self, job: Job, number: int) -> None:
        layout = laid_out(job)
        self.now = 0.0
        self.state = NodeState(job, number, 0.0, receive_buffer=1, grace=1e9)
        self.number, self.stalled, self.brought = number, False, -1
        self.inbox: deque[pb.RecordPart] = deque()
        begin = pb.BeginRequest(job=job.job, ranks=RANKS, run="one", start=b"one", layout=layout.to_json())
        holds = []
        for plan in hold_plans(job, number):
            streams = [
                StreamState(
                    s,
                    stream_layout(layout.schedule, 1, 0, RANKS, side=s.side, shadow_id=plan.shard),
                    connected=True,
                )
                for s in plan.tagged_streams
            ]
            hold = Hold(plan, layout.of_shard(plan.shard), streams, 0, 0)
            hold.update_at(HoldSnapshot(0, dict.fromkeys(hold.parameters, -1)))
            holds.append(hold)
        self.state.begin_group(ShadowGroup(begin, layout, Records(RANKS, 0), holds), 0.0)
        self.refresh()

    @property
    def holds(self) -> list[Hold]:
        return self.state.groups[0].holds

    def refresh(self) -> None:
        self.state.refresh(self.now)
        self.state.take_effects()

    def receive(self, newest: int) -> None:
        """Receive an iteration, if a set of buckets is free for it."""
        free = min((hold.released for hold in self.holds), default=newest) + SETS
        self.brought = min(self.brought + 1, newest, free)
        for hold in self.holds:
            for stream in hold.streams:
                stream.position = stream.layout.nbytes * (self.brought + 1)
                stream.received_bytes = stream.position
                stream.paused = self.brought == free
                stream.queued = (newest - self.brought) / BUFFER if stream.paused else 0  # type: ignore[assignment]

    def take_record(self) -> None:
        if self.inbox:
            self.state.groups[0].records.add(self.inbox.popleft(), self.now)

    def step(self) -> None:
        for due_step in self.state.due_steps(self.now)[:1]:
            record = self.state.begin_step(due_step)
            assert record is not None
            at = HoldSnapshot(
                due_step.iteration + 1, dict.fromkeys(due_step.hold.parameters, due_step.iteration)
            )
            self.state.end_step(due_step, record, Stepped(at), self.now)

    def status(self) -> pb.NodeStatus:
        answer = pb.NodeStatus(node=self.number)
        answer.holds.extend(hold_status(self.state.groups[0], hold, counts=True) for hold in self.holds)
        return answer


class SimulatedWorld:
    """A job's nodes; training continues as long as no buffer overflows."""

    def __init__(self, nodes: int, replicas: int) -> None:
        self.job = local_job(nodes=nodes, ranks=RANKS, replicas=replicas)
        self.nodes = [SimulatedNode(self.job, number) for number in range(nodes)]
        self.ways: dict[tuple[int, int], deque[Callable[[], None]]] = {}
        self.newest = -1
        self.everything()

    def train(self) -> None:
        if any(self.newest - node.brought >= BUFFER + SETS for node in self.nodes):
            return
        self.newest += 1
        for node in self.nodes:
            for position in range(RANKS):
                part = pb.RecordPart(iteration=self.newest, position=position, run="one", start=b"one")
                node.inbox.append(part)

    def tell(self, a: int, b: int) -> None:
        """Send the present message of `a` to `b`."""
        if a == b:
            return
        sender, receiver = self.nodes[a].state.committee, self.nodes[b]
        way = self.ways.setdefault((a, b), deque())
        progress = replace(sender.progress)
        if a > b:
            way.append(lambda: receiver.state.committee.hear_report(a, progress, receiver.now))
        else:
            committed, active = sender.committed, sender.active
            has = (progress.kept_shards, progress.shards, progress.patience)
            way.append(
                lambda: receiver.state.committee.hear_decision(a, committed, active, receiver.now, *has)
            )

    def act(self, kind: str, a: int, b: int) -> None:
        node = self.nodes[a]
        if kind == "train":
            self.train()
        elif kind == "stall":
            node.stalled = True
        elif kind == "go on":
            node.stalled = False
        elif kind == "wait":
            for simulated in self.nodes:
                simulated.now += 0.0 if simulated.stalled else STALL
        elif not node.stalled:
            doings: dict[str, Callable[[], None]] = {
                "receive": lambda: node.receive(self.newest),
                "record": node.take_record,
                "step": node.step,
                "tell": lambda: self.tell(a, b),
                "hear": lambda: self.hear(a, b),
            }
            doings[kind]()
            node.state.tick(node.now)
            node.refresh()

    def hear(self, a: int, b: int) -> None:
        if way := self.ways.get((b, a)):
            way.popleft()()

    def everything(self) -> None:
        """Deliver messages until nothing changes."""
        before: object = None
        while before != (before := self.stands()):
            for a in range(len(self.nodes)):
                for _ in range(BUFFER * RANKS + 1):
                    for kind in ("receive", "record", "record", "step"):
                        self.act(kind, a, 0)
                for b in range(len(self.nodes)):
                    self.act("tell", a, b)
            for a in range(len(self.nodes)):
                for b in range(len(self.nodes)):
                    while self.ways.get((b, a)) and not self.nodes[a].stalled:
                        self.act("hear", a, b)
                    if self.nodes[a].stalled:
                        break

    def stands(self) -> list[object]:
        return [
            (node.brought, len(node.inbox), [hold.released for hold in node.holds]) for node in self.nodes
        ]

    def restart(self) -> Target:
        """Drain, fence, and choose the target, like rank 0."""
        for node in self.nodes:
            node.state.drain()
        self.everything()
        for node in self.nodes:
            node.state.fence()
            node.refresh()
        return find_target(self.job, {node.number: node.status() for node in self.nodes})


KINDS = ["train", "receive", "receive", "record", "record", "step", "tell", "tell", "hear", "hear"]
actions = st.tuples(st.sampled_from([*KINDS, "stall", "go on", "wait"]), st.integers(0, 2), st.integers(0, 2))


def played(world: SimulatedWorld, doings: list[tuple[str, int, int]]) -> Iterator[None]:
    count = len(world.nodes)
    for kind, a, b in doings:
        world.act(kind, a % count, b % count)
        for node in world.nodes:
            check_counters(node)
        yield


def check_counters(node: SimulatedNode) -> None:
    """Check the order that `checkmate/shadow/README.md` has of the counters of iterations."""
    group = node.state.groups[0]
    assert group.begin.first_iteration == group.records.first
    assert max(group.begin.next_iteration, group.reached, group.records.newest + 1) <= group.newest
    for hold in group.holds:
        assert hold.first <= hold.joined <= hold.released + 1
        assert hold.released <= hold.in_full
        assert hold.receiving <= min(hold.released + SETS, group.newest)
        if hold.settled:
            assert hold.receiving == -1
        elif hold.in_full >= hold.joined:
            assert hold.in_full <= min(hold.receiving, group.records.newest)
        if hold.live:
            assert hold.stepped == hold.released


class RejoiningNode(SimulatedNode):
    """The only node of a job, whose holds may lose gradients or their state, and join again."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, 0)
        self.state.grace = 1.0
        self.version = max(hold.stepped for hold in self.holds) + 2

    def refresh(self) -> None:
        self.state.refresh(self.now)
        for effect in self.state.take_effects():
            if isinstance(effect, Join):
                for stream in effect.hold.streams:
                    begin = stream.layout.nbytes * (effect.hold.joined - effect.hold.first)
                    stream.observe(begin, 0, connected=True, paused=False, queued=0)

    def receive(self, newest: int) -> None:
        for hold in self.holds:
            for stream in hold.streams:
                position = stream.position + stream.layout.nbytes // 2
                end = stream.layout.nbytes * (min(newest, hold.released + SETS) + 1)
                if position <= end:
                    stream.observe(position, position, connected=True, paused=position == end, queued=0)

    def train(self, newest: int) -> None:
        for position in range(RANKS):
            self.inbox.append(pb.RecordPart(iteration=newest, position=position, run="one", start=b"one"))

    def end_step(self, trouble: str = "") -> None:
        """Step a hold for which a step is due, and find it equal, or not."""
        for due_step in self.state.due_steps(self.now)[:1]:
            record = self.state.begin_step(due_step)
            assert record is not None
            before = due_step.iteration - 1
            at = {n: before + (i == before) for n, i in due_step.hold.at.items()}
            snapshot = HoldSnapshot(self.next_version(), at)
            troubles = (trouble,) if trouble else ()
            self.state.end_step(due_step, record, Stepped(snapshot, troubles, before), self.now)

    def seed(self, late: int) -> None:
        """Load all parameters that a hold wants, as trainers send them some iterations later."""
        for hold in self.holds:
            numbers = hold.wanted_parameters()
            if numbers and self.state.begin_load(hold):
                at = {**hold.at, **dict.fromkeys(numbers, hold.released + late)}
                self.state.end_load(hold, HoldSnapshot(self.next_version(), at))

    def next_version(self) -> int:
        self.version += 1
        return self.version


ACTION_WEIGHTS = [
    *["train"] * 3,
    *["receive"] * 4,
    *["record"] * 5,
    *["step"] * 6,
    "seed",
    "seed late",
    "differ",
]
ACTION_WEIGHTS += ["pass over", "wait", "reach"]


@settings(max_examples=150)
@given(st.lists(st.sampled_from(ACTION_WEIGHTS), min_size=60, max_size=200))
def test_the_counters_of_a_hold_keep_their_order(doings: list[str]) -> None:
    node, newest = RejoiningNode(local_job(nodes=1, ranks=RANKS)), -1
    for doing in doings:
        match doing:
            case "train":
                newest += 1
                node.train(newest)
            case "receive":
                node.receive(newest)
            case "record":
                node.take_record()
            case "step":
                node.end_step()
            case "differ":
                node.end_step("p0 differs")
            case "seed" | "seed late":
                node.seed(late=doing == "seed late")
            case "pass over":
                newest += 1
            case "wait":
                node.now += 3600.0
            case "reach":
                node.state.groups[0].reach(newest + 1)
        node.state.tick(node.now)
        node.refresh()
        check_counters(node)
    for hold in node.holds:
        hold.settle()
    check_counters(node)


@settings(max_examples=150)
@given(st.integers(1, 3), st.integers(1, 2), st.lists(actions, max_size=120))
def test_a_crash_resumes_from_the_last_iteration_whatever_has_stalled(
    count: int, replicas: int, doings: list[tuple[str, int, int]]
) -> None:
    world = SimulatedWorld(count, min(replicas, count))
    for _ in played(world, doings):
        pass
    for node in world.nodes:
        node.stalled = False
    target = world.restart()
    assert target.iteration == world.newest
    assert all(nodes for nodes in target.holders.values())


@settings(max_examples=150)
@given(st.integers(1, 3), st.lists(actions, max_size=120))
def test_what_one_node_has_stepped_every_other_has_on_its_way(
    count: int, doings: list[tuple[str, int, int]]
) -> None:
    """Check that no node steps beyond the data sent to all, or steps twice."""
    world = SimulatedWorld(count, 1)
    before = [-1] * count
    for _ in played(world, doings):
        stepped = [max((hold.stepped for hold in node.holds), default=-1) for node in world.nodes]
        assert all(old <= new <= world.newest for old, new in zip(before, stepped, strict=True))
        before = stepped


def live_node() -> SimulatedNode:
    """Return the only node of a job, which has stepped 3 and has 5 in full."""
    world = SimulatedWorld(1, 1)
    (node,) = world.nodes
    for _ in range(6):
        world.train()
        node.receive(world.newest)
        for _ in range(RANKS):
            node.take_record()
        node.refresh()
        if world.newest < 4:
            node.step()
            node.refresh()
    (hold,) = node.holds
    assert (hold.stepped, hold.in_full, hold.live) == (3, 5, True)
    return node


def test_a_gap_gives_up_nothing_that_is_whole() -> None:
    """An iteration that waits for another node may be the one from which a restart resumes."""
    node = live_node()
    (hold,) = node.holds
    records = node.state.groups[0].records
    for position in range(RANKS):
        records.add(pb.RecordPart(iteration=7, position=position), node.now)  # 6 was skipped
    node.state.grace = 1.0
    node.now += 10
    node.state.tick(node.now)
    node.refresh()
    assert (hold.live, hold.joined, hold.in_full) == (True, 0, 5)
    node.step()
    node.step()
    node.state.tick(node.now)
    assert (hold.live, hold.stepped, hold.joined) == (False, 5, 8 + AHEAD)


def test_a_gap_gives_up_nothing_while_a_restart_drains() -> None:
    node = live_node()
    node.step()
    node.step()
    (hold,) = node.holds
    for position in range(RANKS):
        node.state.groups[0].records.add(pb.RecordPart(iteration=7, position=position), node.now)
    node.state.grace = 1.0
    node.state.drain()
    node.state.tick(node.now + 10)
    assert (hold.live, hold.joined) == (True, 0)


def test_a_settled_hold_has_no_more_than_it_is_settled_at() -> None:
    (hold,) = live_node().holds
    hold.settle()
    assert (hold.stepped, hold.in_full) == (3, 3)


def test_a_step_that_fails_in_a_restart_leaves_what_is_whole() -> None:
    node = live_node()
    (hold,) = node.holds
    node.state.fence()
    due_step = DueStep(node.state.groups[0], hold, 4)
    assert node.state.begin_step(due_step) is not None
    node.state.fail_step(due_step, ValueError("a bucket is missing"), HoldSnapshot(99, dict(hold.at)))
    assert not any(isinstance(effect, Empty) for effect in node.state.take_effects())
    assert (hold.seeded, hold.stepped) == (True, 3)
    assert "a bucket is missing" in hold.trouble


def test_a_hold_in_doubt_covers_no_shard() -> None:
    """Others wait for a silent node with correct state."""
    node = live_node()
    (hold,) = node.holds
    assert node.state.committee.progress.shards == {hold.shard}
    hold.doubt.begin(3, 2)
    node.refresh()
    assert not node.state.committee.progress.shards


def test_a_hold_that_is_found_equal_again_says_that_it_is_live() -> None:
    """A report takes a shard that differs for lost until then."""
    node = live_node()
    (hold,) = node.holds
    hold.doubt.begin(3, 2)
    hold.doubt.may_renew(node.now)  # not again so soon: it stays live

    def events_after(troubles: tuple[str, ...]) -> list[tuple[str, object]]:
        snapshot = HoldSnapshot(99, dict(hold.at))
        node.state.end_step(
            DueStep(node.state.groups[0], hold, 4), pb.Step(), Stepped(snapshot, troubles, 2), 1.0
        )
        events = [
            effect.event for effect in node.state.take_effects() if isinstance(effect, Log) and effect.event
        ]
        return [
            (effect.name, effect.fields.get("state")) for effect in events if effect.name != "node.trouble"
        ]

    assert events_after(("p0 differs",)) == [("comparison.mismatch", None)]
    assert events_after(()) == [("hold.changed", "live")]
    assert events_after(()) == []


def test_a_difference_is_said_once_and_then_more_and_more_rarely() -> None:
    """Its words have a number that changes. Flapping is repetition, too."""
    node = live_node()
    (hold,) = node.holds
    hold.doubt.may_renew(node.now)  # it stays live

    def messages_after(iteration: int, troubles: tuple[str, ...]) -> list[str]:
        snapshot = HoldSnapshot(99 + iteration, dict(hold.at))
        due_step = DueStep(node.state.groups[0], hold, iteration)
        node.state.end_step(due_step, pb.Step(), Stepped(snapshot, troubles, iteration - 1), 1.0)
        effects = node.state.take_effects()
        return [
            effect.message for effect in effects if isinstance(effect, Log) and effect.level > logging.DEBUG
        ]

    lines = {
        number: messages_after(number, (f"p0 differs after iteration {number}",)) for number in range(4, 16)
    }
    assert {number: line for number, line in lines.items() if line} == {
        4: ["DP group 0, shard 0: p0 differs after iteration 4"],
        13: [
            "DP group 0, shard 0: p0 differs after iteration 13 (8 more like this since the last such line)"
        ],
    }
    assert node.state.tally.mismatches == 12
    assert messages_after(16, ()) == [
        "DP group 0, shard 0: checkpoints of iterations 4 to 15 are doubtful, newer ones are not "
        "(2 more like this since the last such line)"
    ]
    for number in range(17, 80, 2):
        assert not messages_after(number, (f"p0 differs after iteration {number}",))
        assert not messages_after(number + 1, ())
    assert len(node.state.all_troubles) == MAX_DOUBTS
    assert "iterations 79 to 79 are doubtful" in node.state.all_troubles[-1]


def test_a_hold_that_lags_again_and_again_is_one_line_a_minute() -> None:
    (hold,) = live_node().holds
    watch = LagWatch()
    levels = []
    for second in range(0, 100, 10):
        behind = watch.announce(hold, logging.WARNING, "behind", float(second))
        levels += [behind.level, watch.announce(hold, logging.INFO, "caught up", second + 5.0).level]
    loud = [number for number, level in enumerate(levels) if level > logging.DEBUG]
    assert loud == [0, 1, 12, 13]


def part_of(begin: pb.BeginRequest) -> pb.RecordPart:
    return pb.RecordPart(job=begin.job, incarnation=begin.incarnation, run=begin.run, start=begin.start)


@pytest.mark.parametrize(
    ("times", "goes_on"),
    [
        ((0.1, 1.0, 4.9), False),  # of dying trainers
        ((20.0, 20.1, 20.2), False),  # after a break in the network
        ((4.0, 5.5, 6.4), False),
        ((4.0, 5.5, 6.6), True),
        ((30.0, 60.0), True),
    ],
)
def test_records_of_a_superseded_start_show_whether_it_goes_on(
    times: tuple[float, ...], goes_on: bool
) -> None:
    node = live_node()
    begin = node.state.groups[0].begin
    assert node.state.superseded(part_of(begin), "10.0.0.1", 99.0) is None
    node.state.fence()
    node.state.supersede("10.0.0.9", 100.0)
    node.state.take_effects()
    node.state.superseded(part_of(begin), "10.0.0.7", 100.0)  # not late
    for seconds in times:
        start = node.state.superseded(part_of(begin), "10.0.0.1", 100.0 + seconds)
        assert start is not None and start.by == "10.0.0.9"
    messages = [part.message for part in node.state.take_effects() if isinstance(part, Log)]
    assert [line.startswith("an older start of this job still trains") for line in messages] == [
        True
    ] * goes_on
    assert ["records come from 10.0.0.1." in part for part in node.state.all_troubles] == [True] * goes_on
    node.state.tick(100.0 + times[-1] + SILENT_SECONDS + 1)
    assert not node.state.all_troubles, "it has ended"


def test_what_was_noticed_before_a_start_tells_nothing_about_it() -> None:
    """A third start is not warned of the first one, which has ended meanwhile."""
    node = live_node()
    group = node.state.groups[0]
    node.state.fence()
    node.state.supersede("", 100.0)
    for seconds in (6.0, 8.0):
        node.state.superseded(part_of(group.begin), "10.0.0.1", 100.0 + seconds)
    assert node.state.older_starts.hosts == ["10.0.0.1"]
    another = pb.BeginRequest()
    another.CopyFrom(group.begin)
    another.incarnation += 1
    node.state.begin_group(ShadowGroup(another, group.layout, Records(RANKS, 0), []), 110.0)
    assert not node.state.older_starts.hosts
    for seconds in (11.0, 11.1, 13.0):
        node.state.superseded(part_of(group.begin), f"10.0.0.{seconds:g}", 100.0 + seconds)
    hosts = ["10.0.0.11", "10.0.0.11.1", "10.0.0.13"]
    assert node.state.older_starts.hosts == hosts, "it goes on beside this one, too"


def test_a_start_whose_ranks_are_dropped_cannot_begin_again() -> None:
    """Its trainers may still ask for it: their `Begin` came before that of the ranks in its place."""
    job = local_job(nodes=1, ranks=RANKS + 1)
    (group,) = job.dp_groups
    node = SimulatedNode(replace(job, dp_groups=(replace(group, ranks=group.ranks[:RANKS]),)), 0)
    begin = node.state.groups[0].begin
    node.state.ended_starts.check(begin, node.state.generation)
    node.state.take_up(job, node.now)
    assert not node.state.groups
    with pytest.raises(StartEnded):
        node.state.ended_starts.check(begin, node.state.generation)
    part = pb.RecordPart(iteration=0, run=begin.run, start=begin.start)
    assert node.state.superseded(part, "10.0.0.1", node.now) is not None
