"""Which iteration a restart names: the rule, against brute force; and incarnations that wrap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.target import (
    Missing,
    Target,
    choose,
    next_incarnation,
    settled,
    spread,
    whole,
)

SHARDS = [(0, 0), (0, 1), (1, 0)]


def hold(
    shard: tuple[int, int] = (0, 0),
    stepped: int = 5,
    in_full: int = 6,
    *,
    incarnation: int = 3,
    first: int = 0,
    run: str = "a",
    seeded: bool = True,
    doubtful: bool = False,
    lacks: int = 0,
) -> pb.HoldStatus:
    return pb.HoldStatus(
        shard=pb.Shard(group=shard[0], shard=shard[1]),
        incarnation=incarnation,
        stepped=stepped,
        in_full=in_full,
        seeded=seeded,
        run=run,
        first_iteration=first,
        doubtful=doubtful,
        lacks_buffers=lacks,
    )


def node(number: int, *holds: pb.HoldStatus) -> pb.NodeStatus:
    incarnation = max((one.incarnation for one in holds), default=0)
    return pb.NodeStatus(node=number, holds=holds, holds_nothing=not holds, incarnation=incarnation)


@st.composite
def holds(draw: st.DrawFn) -> pb.HoldStatus:
    stepped = draw(st.integers(-1, 6))
    return hold(
        draw(st.sampled_from(SHARDS)),
        stepped,
        stepped + draw(st.integers(0, 2)),
        seeded=draw(st.integers(0, 9)) > 0,
        doubtful=draw(st.integers(0, 9)) == 0,
    )


@given(st.lists(st.lists(holds(), max_size=4), max_size=4))
def test_the_target_is_what_all_that_are_far_enough_can_reach(nodes: list[list[pb.HoldStatus]]) -> None:
    answers = [node(number, *of_node) for number, of_node in enumerate(nodes)]
    good = [h for answer in answers for h in answer.holds if h.seeded and not h.doubtful]
    stepped = max((h.stepped for h in good), default=-1)
    able = [h for h in good if h.in_full >= stepped]
    covered = {(h.shard.group, h.shard.shard) for h in able}
    found = choose(SHARDS, answers)
    if isinstance(found, Missing):
        assert set(found.shards) == set(SHARDS) - covered
        return
    assert covered == set(SHARDS)
    assert all(h.stepped <= found.iteration for h in good)  # nobody has to go back
    assert all(found.iteration <= h.in_full for h in able)  # all of them can go there
    assert any(found.iteration == h.in_full for h in able)  # and no further
    for shard in SHARDS:
        can = {
            answer.node
            for answer in answers
            for h in answer.holds
            if h in able and (h.shard.group, h.shard.shard) == shard
        }
        assert set(found.holders[shard]) == can


def test_nobody_answers_or_nobody_holds_anything() -> None:
    assert choose([(0, 0)], []) == Missing(((0, 0),))
    assert choose([(0, 0)], [node(0)]) == Missing(((0, 0),))


def test_one_node_has_all_of_the_last_iteration_and_another_has_not() -> None:
    found = choose([(0, 0), (0, 1)], [node(0, hold((0, 0), 6, 7)), node(1, hold((0, 1), 6, 6))])
    assert isinstance(found, Target)
    assert found.iteration == 6


def test_a_holder_that_lags_is_left_out_where_another_has_the_shard() -> None:
    found = choose([(0, 0)], [node(0, hold(stepped=3, in_full=4)), node(1, hold(stepped=6, in_full=7))])
    assert found == Target(7, "a", {(0, 0): (1,)})


def test_a_holder_that_lacks_buffers_is_left_out_where_another_has_them() -> None:
    late = [node(0, hold((0, 0), lacks=2), hold((0, 1), lacks=2)), node(1, hold((0, 0), in_full=7))]
    found = choose([(0, 0), (0, 1)], late)
    assert found == Target(6, "a", {(0, 0): (1,), (0, 1): (0,)})
    alone = choose([(0, 0)], [node(0, hold(lacks=2)), node(1, hold(lacks=1))])
    assert alone == Target(6, "a", {(0, 0): (0, 1)}, lacking=1)
    begun = choose([(0, 0)], [node(0, hold(stepped=-1, in_full=0, lacks=2))])
    assert begun == Target(0, "a", {(0, 0): (0,)})
    groups = choose([(0, 0), (1, 0)], [node(0, hold((0, 0)), hold((1, 0), lacks=3))])
    assert groups == Target(6, "a", {(0, 0): (0,), (1, 0): (0,)}, lacking=3)


def test_a_crash_while_an_incarnation_begins_loses_nothing() -> None:
    """Node 0 has begun the new incarnation at iteration 7, node 1 not yet: both have iteration 6."""
    begun = hold((0, 0), 6, 6, incarnation=4, first=7)
    not_yet = hold((0, 1), 6, 6, incarnation=3)
    found = choose([(0, 0), (0, 1)], [node(0, begun), node(1, not_yet)])
    assert found == Target(6, "a", {(0, 0): (0,), (0, 1): (1,)})
    unsettled = hold((0, 1), 5, 7, incarnation=3)
    found = choose([(0, 0), (0, 1)], [node(0, begun), node(1, unsettled)])
    assert found == Target(6, "a", {(0, 0): (0,), (0, 1): (1,)})


def test_what_an_old_incarnation_has_done_beyond_a_restart_is_not_mixed_in() -> None:
    now = hold((0, 0), 8, 8, incarnation=4, first=7)
    elsewhere = hold((0, 1), 8, 8, incarnation=3)
    assert choose([(0, 0), (0, 1)], [node(0, now), node(1, elsewhere)]) == Missing(((0, 1),))


def test_another_run_is_not_mixed_in() -> None:
    now = hold((0, 0), 6, 6, incarnation=4, first=7, run="b")
    other = hold((0, 1), 6, 6, incarnation=3, run="a")
    assert choose([(0, 0), (0, 1)], [node(0, now), node(1, other)]) == Missing(((0, 1),))


def test_a_stale_node_does_not_hold_back_the_others() -> None:
    """It was away at the last restart, and is further than where that resumed."""
    stale = hold((0, 0), 9, 9, incarnation=3)
    now = hold((0, 0), 7, 8, incarnation=4, first=7)
    assert choose([(0, 0)], [node(0, stale), node(1, now)]) == Target(8, "a", {(0, 0): (1,)})


def test_no_incarnation() -> None:
    assert next_incarnation([], 256 * 7 + 5.5) == 5
    assert next_incarnation([node(0, hold(incarnation=255))], 0) == 0


def test_only_nodes_that_settled_are_read_from() -> None:
    target = Target(6, "a", {(0, 0): (0, 1), (0, 1): (1,)})
    did = node(0, hold((0, 0), 6, 6))
    went_on = node(1, hold((0, 0), 7, 7), hold((0, 1), 6, 6, run="b"))
    found = settled([(0, 0), (0, 1)], target, [did, went_on])
    assert found == {(0, 0): [0], (0, 1): []}
    assert not whole(found)


@given(st.lists(st.integers(), min_size=1, max_size=5, unique=True), st.integers(0, 20))
def test_ranks_spread_over_holders(holders: list[int], rank: int) -> None:
    order = spread(holders, rank)
    assert sorted(order) == sorted(holders)
    assert order[0] == holders[rank % len(holders)]
