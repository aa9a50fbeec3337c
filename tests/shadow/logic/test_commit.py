"""The commit protocol: nodes report to each other in any order, and may die at any moment."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkmate.shadow.logic.commit import MAX_SILENCE, MIN_SILENCE, NEVER, Committee, KeptShard, Progress

BUFFERS = 2
ProgressReport = tuple[int, bool, tuple[KeptShard, ...]]


class SimulatedCommittees:
    """A node with its view of the others. Like real ones, it buffers two iterations."""

    def __init__(self, number: int, count: int, *, live: bool = True) -> None:
        self.number = number
        self.view = Committee(number, range(count), 0, 0.0)
        self.in_full = self.stepped = -1
        self.live, self.dead = live, False
        self.is_kept = self.pressed = False
        self.refresh()  # a hold goes live as it is reported, before any message leaves

    def refresh(self) -> None:
        if not (self.live or self.is_kept) and self.stepped >= max(self.view.committed, 0):
            self.live = True
        self.view.report(self.progress())
        self.view.decide(0.0)

    def progress(self) -> Progress:
        shard = (0, self.number)
        return Progress(
            incarnation=0,
            in_full=self.in_full if self.live else NEVER,
            stepped=self.stepped if self.live else NEVER,
            live=self.live,
            shards=frozenset([shard]) if self.live else frozenset(),
            kept_shards=() if self.live or not self.is_kept else ((shard, self.stepped),),
            pressed=self.pressed,
        )

    def receive(self, newest: int) -> None:
        if self.in_full < min(newest, self.stepped + BUFFERS):
            self.in_full += 1

    def step(self) -> None:
        if self.stepped < min(self.in_full, self.view.committed):
            self.stepped += 1


class SimulatedJob:
    """Nodes and the messages between them, which stay in order on each way, as on a stream."""

    def __init__(self, count: int, late: frozenset[int]) -> None:
        self.nodes = [SimulatedCommittees(i, count, live=i not in late) for i in range(count)]
        self.count = count
        self.steady = [node for node in self.nodes if node.live]
        self.newest = -1
        self.ways: dict[tuple[int, int], deque[Progress | ProgressReport]] = {
            (a, b): deque() for a in range(count) for b in range(count) if a != b
        }

    def tell(self, a: int, b: int) -> None:
        """Send the present message of `a` to `b`."""
        node = self.nodes[a]
        if a > b:
            self.ways[a, b].append(node.progress())
        else:
            self.ways[a, b].append((node.view.committed, node.view.active, node.progress().kept_shards))

    def deliver(self, a: int, b: int) -> None:
        """Deliver the next message from `a` to `b`; after the last of a dead node, `b` notices its death."""
        node, way = self.nodes[b], self.ways[a, b]
        if not way:
            if self.nodes[a].dead:
                node.view.note_end(a)
        elif isinstance(message := way.popleft(), Progress):
            node.view.hear_report(a, message, 0.0)
        else:
            step_to, active, kept_shards = message
            node.view.hear_decision(a, step_to, active, 0.0, kept_shards)
        node.refresh()

    def act(self, kind: str, a: int, b: int) -> None:
        node = self.nodes[a]
        if kind == "train":
            self.newest += 1
        elif kind == "die":
            node.dead = node.dead or sum(not n.dead for n in self.steady) > 1 or node not in self.steady
        elif node.dead and kind != "deliver":
            return
        elif kind == "receive":
            node.receive(self.newest)
            node.refresh()
        elif kind == "step":
            node.step()
            node.refresh()
        elif a != b and kind == "tell":
            self.tell(a, b)
        elif a != b and kind == "deliver" and not self.nodes[b].dead:
            self.deliver(a, b)

    def check(self) -> None:
        """Check that every live node has in full all iterations that any node has stepped while live."""
        furthest = max(node.stepped for node in self.nodes if node.live)
        for node in self.steady:
            assert node.dead or node.in_full >= furthest, f"node {node.number} lacks {furthest}"

    def settle(self, lost_node: int | None = None) -> None:
        """Deliver all messages until nothing changes; node `lost` receives nothing."""
        for _ in range(12 * (self.newest + 3)):
            for a in range(self.count):
                for b in range(self.count):
                    for kind in ("receive", "step", "tell", "deliver"):
                        if a != lost_node or kind in ("tell", "deliver"):
                            self.act(kind, a, b)
                    while a != b and self.ways[a, b] and not self.nodes[b].dead:
                        self.act("deliver", a, b)
            if lost_node is None:
                self.check()


actions = st.tuples(
    st.sampled_from(["train", "receive", "receive", "step", "tell", "tell", "deliver", "deliver", "die"]),
    st.integers(0, 3),
    st.integers(0, 3),
)


@settings(max_examples=400)
@example(
    2, frozenset(), [("train", 0, 0), ("receive", 1, 0), ("tell", 0, 1), ("deliver", 0, 1), ("step", 1, 0)]
)
@given(st.integers(1, 4), st.frozensets(st.integers(1, 3), max_size=2), st.lists(actions, max_size=150))
def test_whenever_nodes_die_all_are_at_or_can_reach_the_same_iteration(
    count: int, late: frozenset[int], doings: list[tuple[str, int, int]]
) -> None:
    job = SimulatedJob(count, late)
    for kind, a, b in doings:
        job.act(kind, a % count, b % count)
        job.check()
    job.settle()
    alive = [node for node in job.nodes if not node.dead]
    assert {node.stepped for node in alive} == {job.newest}
    deciders = {node.view.decider(0.0) for node in alive if node.live}
    assert deciders == {min(node.number for node in alive if node.live)}


@settings(max_examples=100)
@given(
    st.integers(0, 2),
    st.lists(
        st.tuples(
            st.sampled_from(["train", "receive", "receive", "step", "tell", "deliver"]),
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        max_size=150,
    ),
    st.integers(0, 150),
)
def test_a_shard_with_a_gap_is_not_left_behind_while_there_is_room(
    victim: int, doings: list[tuple[str, int, int]], when: int
) -> None:
    """Its state and the others' form one iteration, until they have to continue."""
    job = SimulatedJob(3, frozenset())
    for kind, a, b in doings[:when]:
        job.act(kind, a, b)
    job.settle()
    gap_node = job.nodes[victim]
    gap_node.live, gap_node.is_kept = False, True  # a gap: it is reported at once
    gap_node.refresh()
    for number in range(3):
        if number != victim:
            job.tell(victim, number)
            job.deliver(victim, number)
    at = gap_node.stepped
    for kind, a, b in (*doings[when:], *[("train", 0, 0)] * 3):
        if a != victim:
            job.act(kind, a, b)
    job.settle(lost_node=victim)
    rest = [node for node in job.nodes if node is not gap_node]
    assert all(node.stepped <= at <= node.in_full for node in rest)
    for node in rest:
        node.pressed = True
    job.settle(lost_node=victim)
    assert {node.stepped for node in rest} == {job.newest}


def test_nothing_waits_for_a_shard_that_is_not_level_or_has_another_holder_or_whose_node_is_gone() -> None:
    own_shard, peer_shard = (0, 0), (0, 1)

    def stands(
        kept_shards: tuple[tuple[tuple[int, int], int], ...], shards: frozenset[tuple[int, int]]
    ) -> bool:
        view = committee(count=2)
        view.report(progress(5, 4, shards=shards))
        view.hear_report(1, progress(NEVER, NEVER, live=False, kept_shards=kept_shards), 100.1)
        view.committed = 4
        return view.decide(100.2) == 4

    assert stands(((peer_shard, 4),), frozenset([own_shard]))
    assert not stands(((peer_shard, 3),), frozenset([own_shard]))
    assert not stands(((peer_shard, 4),), frozenset([own_shard, peer_shard]))
    assert not stands((), frozenset([own_shard]))
    view = committee(count=2)
    view.report(progress(5, 4, shards=frozenset([own_shard])))
    view.hear_report(1, progress(NEVER, NEVER, live=False, kept_shards=((peer_shard, 4),)), 100.1)
    view.committed = 4
    assert view.decide(100.2) == 4
    view.note_end(1)
    assert view.decide(100.2) == 5


def test_another_start_of_the_same_incarnation_is_not_heard() -> None:
    view = Committee(0, range(2), 4, began=100.0, start=b"second")
    view.hear_report(1, Progress(incarnation=4, in_full=20, stepped=19, live=True, start=b"first"), 100.1)
    assert view.committed == NEVER
    view.hear_report(1, Progress(incarnation=4, in_full=1, stepped=0, live=True, start=b"second"), 100.2)
    assert view.committed == 0


def committee(me: int = 0, count: int = 3) -> Committee:
    view = Committee(me, range(count), 4, began=100.0)
    view.report(Progress(incarnation=4, in_full=5, stepped=4, live=True))
    return view


def progress(in_full: int, stepped: int, **fields: object) -> Progress:
    return Progress(**{"incarnation": 4, "in_full": in_full, "stepped": stepped, "live": True, **fields})  # type: ignore[arg-type]


def test_nothing_is_decided_before_all_have_been_heard_or_were_silent_for_long() -> None:
    view = committee()
    view.hear_report(1, progress(5, 4), 100.0)
    assert view.decide(100.0) == 4  # steps of node 1 were decided before
    assert view.decide(100.0 + MAX_SILENCE) == 4
    view.hear_report(1, progress(5, 4), 100.1 + MAX_SILENCE)
    assert view.decide(100.1 + MAX_SILENCE) == 5


def test_a_process_that_ended_is_not_waited_for_and_a_silent_one_for_a_quarter_of_the_patience() -> None:
    view = committee()
    view.hear_report(1, progress(5, 4, patience=8.0), 100.0)
    view.hear_report(2, progress(4, 4), 100.0)
    assert view.decide(101.9) == 4
    view.hear_report(1, progress(5, 4, patience=8.0), 102.1)
    assert view.decide(102.1) == 5
    second_view = committee()
    second_view.hear_report(1, progress(5, 4), 100.0)
    second_view.hear_report(2, progress(4, 4), 100.0)
    second_view.note_end(2)
    assert second_view.decide(100.0) == 5


FIRST_SHARD, SECOND_SHARD = (0, 0), (0, 1)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize(
    ("covered", "pressed", "after", "committed"),
    [
        (False, False, 6.0, 4),  # its buffers are not full: it may return with all data
        (False, True, 6.0, 5),  # ours are full: one at a time
        (True, False, 6.0, 6),  # another one has its shard
        (False, False, 31.0, 6),  # its own are full now
    ],
)
def test_a_silent_node_is_stepped_past_only_for_want_of_room_or_if_its_shards_have_another_live_holder(
    *, lower: bool, covered: bool, pressed: bool, after: float, committed: int
) -> None:
    view = committee(me=1 if lower else 0, count=2)
    shards = frozenset([FIRST_SHARD, SECOND_SHARD] if covered else [FIRST_SHARD])
    view.report(progress(6, 4, shards=shards, pressed=pressed))
    if lower:
        view.hear_decision(0, 4, True, 100.0, (), frozenset([SECOND_SHARD]), 30.0)
    else:
        view.hear_report(1, progress(4, 4, shards=frozenset([SECOND_SHARD]), patience=30.0), 100.0)
    assert view.decide(100.1) == 4
    assert view.decide(100.0 + after) == committed


def test_a_node_that_has_forgotten_the_start_is_not_waited_for() -> None:
    """Its process was restarted, and its state is lost."""
    view = committee(count=2)
    view.report(progress(6, 4, shards=frozenset([FIRST_SHARD])))
    view.hear_report(1, progress(4, 4, shards=frozenset([SECOND_SHARD])), 100.0)
    view.hear_report(1, Progress(incarnation=-1 % 256, in_full=NEVER, stepped=NEVER, live=False), 100.1)
    assert view.decide(100.2) == 6
    late = committee(count=2)  # one that has not begun this start yet has lost nothing
    late.hear_report(1, Progress(incarnation=3, in_full=9, stepped=9, live=True), 100.0)
    assert late.decide(100.2) == NEVER


def test_silence_has_its_bounds() -> None:
    view = committee()
    assert view.silence == MAX_SILENCE
    view.hear_report(1, progress(5, 4, patience=0.001), 100.0)
    assert view.silence == MIN_SILENCE


def test_who_was_left_behind_counts_again_once_it_has_caught_up() -> None:
    view = committee(count=2)
    view.note_end(1)
    assert view.decide(100.0) == 5
    view.hear_report(1, progress(4, 4), 101.0)
    view.report(progress(6, 5))
    assert view.decide(101.0) == 6
    assert view.behind == {1: 1}
    view.hear_report(1, progress(6, 5), 101.0)
    view.report(progress(7, 6))
    assert view.decide(101.0) == 6
    assert not view.behind


def test_what_another_incarnation_says_is_not_heard() -> None:
    view = committee(count=2)
    view.hear_report(1, progress(9, 9, incarnation=3), 100.0)
    assert view.decide(100.0) == NEVER


def test_a_lower_node_decides_as_soon_as_it_is_active_and_as_long_as_it_speaks() -> None:
    view = committee(me=1, count=2)
    assert view.decider(100.0) is None
    view.hear_decision(0, NEVER, False, 100.0)
    assert view.decider(100.0) == 1
    view.hear_decision(0, 4, True, 100.0)
    assert (view.decider(100.0), view.committed) == (0, 4)
    assert view.decide(100.0) == 4
    assert view.decider(100.1 + MAX_SILENCE) == 1
    assert view.decide(100.1 + MAX_SILENCE) == 5


def test_a_node_that_others_have_left_behind_does_not_decide() -> None:
    view = committee(count=2)
    view.hear_report(1, progress(9, 8), 100.0)
    assert not view.active
    view.report(progress(8, 7))
    assert view.active


def test_nobody_is_live_only_when_all_were_heard_or_are_silent_or_gone() -> None:
    view = Committee(1, range(3), 4, began=100.0)
    assert not view.nobody_live(100.0)  # all are unknown
    view.hear_decision(0, NEVER, False, 100.0)
    assert not view.nobody_live(100.0)
    assert view.nobody_live(100.1 + MAX_SILENCE)
    view.hear_report(2, progress(5, 4, live=False), 100.0)
    assert view.nobody_live(100.0)
    view.hear_report(2, progress(5, 4), 100.0)
    assert not view.nobody_live(100.1 + MAX_SILENCE)
    view.note_end(2)
    assert view.nobody_live(100.0)
    view.report(progress(5, 4))
    assert not view.nobody_live(100.0)
