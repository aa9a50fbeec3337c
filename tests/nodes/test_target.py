"""The iteration to restart from: the rule, compared with brute force; and incarnations that wrap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.nodes.standing import Answers, Lacking, NoAnswer, Shard, beginning_of, newest_refusal
from checkmate.nodes.target import Target, find_settled, find_target, next_incarnation
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.start.from_nodes import spread
from testbed.jobs import job
from tests.support.shadow.standings import JOB, SHARDS, all_holds, answers, hold, hold_of, newest, node

TWO = job(nodes=2, replicas=2)
"""Two shards, and two nodes that hold both."""


def find(answers_by_node: Answers) -> Target | None:
    try:
        return find_target(JOB, answers_by_node)
    except Lacking:
        return None


def usable(answers_by_node: Answers) -> dict[str, list[tuple[int, Shard, int, int]]]:
    """Return, for each of the newest starts, the ranges that holds can be settled at, by node and shard."""
    of_newest = newest(answers_by_node)
    starts = {
        beginning_of(each_hold)
        for each_hold in all_holds(answers_by_node)
        if (each_hold.generation, each_hold.incarnation) == of_newest
    }
    holders: dict[str, list[tuple[int, Shard, int, int]]] = {}
    for start in starts:
        reach = holders.setdefault(str(start), [])
        origin = start.first_iteration - 1
        for number, answer in answers_by_node.items():
            for each_hold in answer.holds if isinstance(answer, pb.NodeStatus) else ():
                shard = (each_hold.shard.group, each_hold.shard.shard)
                if each_hold.doubtful or not each_hold.seeded or each_hold.run != start.run:
                    continue
                if (each_hold.incarnation, each_hold.start) == (start.incarnation, start.start):
                    reach.append((number, shard, each_hold.stepped, each_hold.in_full))
                elif (
                    origin_of(each_hold, origin) == start.continues
                    and each_hold.stepped <= origin <= each_hold.in_full
                ):
                    reach.append((number, shard, each_hold.stepped, origin))
    return holders


def origin_of(status: pb.HoldStatus, iteration: int) -> bytes:
    """Return the start that stepped an iteration of a hold."""
    return status.start if iteration >= status.first_iteration else status.continues


def whole_at(reach: list[tuple[int, Shard, int, int]]) -> list[int]:
    """Return every iteration that all shards can be settled at."""
    return [
        i
        for i in range(-1, 12)
        if {shard for _, shard, low, high in reach if low <= i <= high} == set(SHARDS)
    ]


@given(answers())
def test_the_target_is_what_every_shard_can_reach(answers_by_node: Answers) -> None:
    target, reaches = find(answers_by_node), usable(answers_by_node)
    if target is None:
        assert not any(whole_at(reach) for reach in reaches.values())
        return
    assert any(explains(target, reach) for reach in reaches.values())
    holds = [
        hold_of(answers_by_node, number, shard) for shard, nodes in target.holders.items() for number in nodes
    ]
    assert {each_hold.run for each_hold in holds} == {target.run}
    assert not any(each_hold.doubtful for each_hold in holds)
    assert all(each_hold.stepped <= target.iteration <= each_hold.in_full for each_hold in holds)


def explains(target: Target, reach: list[tuple[int, Shard, int, int]]) -> bool:
    """Return whether a target is right, if its start's holds can be settled at these ranges."""
    stepped = max((low for _, _, low, _ in reach), default=-1)
    able = {(n, shard) for n, shard, low, high in reach if low <= target.iteration <= high}
    holders = {(number, shard) for shard, nodes in target.holders.items() for number in nodes}
    if not holders <= able or set(SHARDS) != {shard for _, shard in holders}:
        return False
    if target.behind:  # no newer iteration is complete
        best = max(whole_at(reach))
        return target.iteration == best == stepped - target.behind
    far_enough = [(low, high) for _, _, low, high in reach if high >= stepped]
    return (
        target.iteration >= stepped  # no hold has to go back
        and all(target.iteration <= high for _, high in far_enough)  # all of them can reach it
        and any(target.iteration == high for _, high in far_enough)  # but not a later one
    )


@given(answers(), st.data())
def test_an_answer_more_takes_nothing_away(answers_by_node: Answers, data: st.DataObject) -> None:
    """Unless it has a newer start of training."""
    left_out = data.draw(st.sampled_from(sorted(answers_by_node)))
    fewer = {number: answer for number, answer in answers_by_node.items() if number != left_out}
    if newest(fewer) == newest(answers_by_node) and find(fewer) is not None:
        assert find(answers_by_node) is not None


@given(answers(), st.data())
def test_what_settles_is_read_from(answers_by_node: Answers, data: st.DataObject) -> None:
    target = find(answers_by_node)
    if target is None:
        return
    after: dict[int, pb.NodeStatus | str] = dict(answers_by_node)
    for answer in after.values():
        for hold_status in answer.holds if isinstance(answer, pb.NodeStatus) else ():
            if (
                hold_status.run == target.run
                and hold_status.stepped <= target.iteration <= hold_status.in_full
            ):
                hold_status.stepped = target.iteration
    lost_node = data.draw(st.sampled_from(sorted(answers_by_node)))
    assert find_settled(JOB, target, after) == {shard: list(nodes) for shard, nodes in target.holders.items()}
    after[lost_node] = "did not answer in time"
    try:
        remaining = find_settled(JOB, target, after)
    except Lacking as error:
        assert error.shards.keys() == {
            shard for shard, nodes in target.holders.items() if nodes == (lost_node,)
        }
    else:
        assert all(lost_node not in nodes for nodes in remaining.values())


def both(stepped: int, in_full: int, **changes: object) -> list[pb.HoldStatus]:
    return [hold((0, shard), stepped, in_full, **changes) for shard in range(2)]  # type: ignore[arg-type]


def test_nobody_answers_or_nobody_holds_anything() -> None:
    with pytest.raises(NoAnswer):
        find_target(TWO, {})
    with pytest.raises(Lacking, match="shadow node 0 .*: holds nothing, shadow node 1 .*: has not answered"):
        find_target(TWO, {0: node(0)})


def test_one_node_has_all_of_the_last_iteration_and_another_has_not() -> None:
    target = find_target(TWO, {0: node(0, hold((0, 0), 6, 7)), 1: node(1, hold((0, 1), 6, 6))})
    assert target.iteration == 6


def test_a_holder_that_lags_is_left_out_if_another_has_the_shard() -> None:
    target = find_target(TWO, {0: node(0, *both(3, 4)), 1: node(1, *both(6, 7))})
    assert target == Target(7, "a", {(0, 0): (1,), (0, 1): (1,)})


def test_if_nothing_newer_is_whole_nodes_that_lag_together_are_resumed_from() -> None:
    """A node is ahead in one shard, but lacks the other one, which is available at an older iteration."""
    alone = node(2, hold((0, 0), 8, 8))
    answers = {0: node(0, hold((0, 0), 5, 6)), 1: node(1, hold((0, 1), 5, 7)), 2: alone}
    three_nodes = job(nodes=3, replicas=2)
    third = hold((0, 2), 6, 7)
    answers[0].holds.append(third)
    target = find_target(three_nodes, answers)
    assert target == Target(6, "a", {(0, 0): (0,), (0, 1): (1,), (0, 2): (0,)}, behind=2)
    assert not target.complete


def test_who_has_gone_on_alone_is_named() -> None:
    answers = {0: node(0, hold((0, 0), 8, 8)), 1: node(1, hold((0, 1), 5, 7))}
    with pytest.raises(Lacking) as info:
        find_target(job(nodes=2), answers)
    assert str(info.value).endswith("has stepped iteration 5 and has 7 in full, but another has stepped 8")


def test_a_holder_that_lacks_buffers_is_left_out_if_another_has_them() -> None:
    late = node(0, hold((0, 0), lacks=2), hold((0, 1), lacks=2))
    target = find_target(TWO, {0: late, 1: node(1, hold((0, 0), in_full=7))})
    assert target == Target(6, "a", {(0, 0): (1,), (0, 1): (0,)})
    alone = find_target(TWO, {0: node(0, *both(5, 6, lacks=2)), 1: node(1, *both(5, 6, lacks=1))})
    assert alone == Target(6, "a", {(0, 0): (0, 1), (0, 1): (1, 0)}, lacking=1)
    assert not alone.complete
    first_target = find_target(TWO, {0: node(0, *both(-1, 0, lacks=2))})
    assert first_target == Target(0, "a", {(0, 0): (0,), (0, 1): (0,)})
    stages = job(groups=2)
    groups = find_target(stages, {0: node(0, hold((0, 0)), hold((1, 0), lacks=3))})
    assert groups == Target(6, "a", {(0, 0): (0,), (1, 0): (0,)}, lacking=3)


def test_a_crash_while_an_incarnation_begins_loses_nothing() -> None:
    """Node 0 has begun the new incarnation at iteration 7, node 1 has not: both have iteration 6."""
    new_hold = hold((0, 0), 6, 6, incarnation=4, first=7)
    not_yet = hold((0, 1), 6, 6, incarnation=3)
    target = find_target(TWO, {0: node(0, new_hold), 1: node(1, not_yet)})
    assert target == Target(6, "a", {(0, 0): (0,), (0, 1): (1,)})
    unsettled = hold((0, 1), 5, 7, incarnation=3)
    target = find_target(TWO, {0: node(0, new_hold), 1: node(1, unsettled)})
    assert target == Target(6, "a", {(0, 0): (0,), (0, 1): (1,)})


def test_what_an_old_incarnation_has_done_beyond_a_restart_is_not_mixed_in() -> None:
    now = hold((0, 0), 8, 8, incarnation=4, first=7)
    elsewhere = hold((0, 1), 8, 8, incarnation=3)
    with pytest.raises(
        Lacking, match="is still in incarnation 3, not 4, which began at iteration 7, and has"
    ):
        find_target(TWO, {0: node(0, now), 1: node(1, elsewhere)})


def test_a_hold_that_forked_from_the_run_before_the_newest_start_is_left_out() -> None:
    """Node 1 was away when start B continued A at iteration 5; C continues B at 7. A's 6 is not B's 6."""
    now = [hold((0, s), 7, 7, incarnation=5, first=7, start=b"C", continues=b"B") for s in range(2)]
    forked = [hold((0, s), 5, 9, incarnation=3, first=0, start=b"A", continues=b"A") for s in range(2)]
    target = find_target(TWO, {0: node(0, *now), 1: node(1, *forked)})
    assert (target.iteration, target.start) == (7, b"C")
    assert target.holders == {(0, 0): (0,), (0, 1): (0,)}
    with pytest.raises(Lacking, match="is still in incarnation 3, not 5"):
        find_target(TWO, {0: node(0, now[0]), 1: node(1, forked[1])})
    missed = hold((0, 1), 5, 9, incarnation=4, first=5, start=b"B", continues=b"A")
    same = hold((0, 0), 6, 6, incarnation=5, first=7, start=b"C", continues=b"B")
    target = find_target(TWO, {0: node(0, same), 1: node(1, missed)})
    assert (target.iteration, target.start) == (6, b"B")


def test_another_run_is_not_mixed_in() -> None:
    now = hold((0, 0), 6, 6, incarnation=4, first=7, run="b")
    other_run = hold((0, 1), 6, 6, incarnation=3, run="a")
    with pytest.raises(Lacking, match="^shard 1 of .* is still in incarnation 3, not 4, shadow node 0"):
        find_target(TWO, {0: node(0, now), 1: node(1, other_run)})


def test_a_stale_node_does_not_hold_back_the_others() -> None:
    """It was away at the last restart, and is ahead of the iteration where that resumed."""
    answers = {0: node(0, *both(9, 9)), 1: node(1, *both(7, 8, incarnation=4, first=7))}
    assert find_target(TWO, answers) == Target(8, "a", {(0, 0): (1,), (0, 1): (1,)})


def test_starts_of_one_number_are_not_put_together() -> None:
    """A node that was away may have begun a start that no other node knows, with the others' number."""
    answers = {0: node(0, hold((0, 0), 6, 6, first=5)), 1: node(1, hold((0, 1), 6, 6))}
    with pytest.raises(Lacking, match="is in another start of training, which has the same incarnation 3"):
        find_target(TWO, answers)
    twin = {0: node(0, hold((0, 0), 6, 6, start=b"1")), 1: node(1, hold((0, 1), 6, 6, start=b"2"))}
    with pytest.raises(Lacking, match="is in another start of training, which has the same incarnation 3"):
        find_target(TWO, twin)
    answers[1].holds.append(hold((0, 0), 6, 6))
    assert find_target(TWO, answers).holders == {(0, 0): (1,), (0, 1): (1,)}


def test_no_incarnation() -> None:
    assert next_incarnation([], 256 * 7 + 5.5) == 5
    assert next_incarnation([node(0, hold(incarnation=255))], 0) == 0


def test_only_nodes_that_settled_are_read_from() -> None:
    target = Target(6, "a", {(0, 0): (0, 1), (0, 1): (1,)})
    did = node(0, hold((0, 0), 6, 6))
    went_on = node(1, hold((0, 0), 7, 7), hold((0, 1), 6, 6, run="b"))
    with pytest.raises(Lacking) as info:
        find_settled(TWO, target, {0: did, 1: went_on})
    assert info.value.shards.keys() == {(0, 1)}
    good = node(1, hold((0, 0), 7, 7), hold((0, 1), 6, 6))
    assert find_settled(TWO, target, {0: did, 1: good}) == {(0, 0): [0], (0, 1): [1]}


@given(st.lists(st.integers(), min_size=1, max_size=5, unique=True), st.integers(0, 20))
def test_ranks_spread_over_holders(holders: list[int], rank: int) -> None:
    order = spread(holders, rank)
    assert sorted(order) == sorted(holders)
    assert order[0] == holders[rank % len(holders)]


def with_refusal(answer: pb.NodeStatus, incarnation: int, generation: int = 1, **more: Any) -> pb.NodeStatus:
    """Return an answer with a refusal in it."""
    answer.refusal.CopyFrom(pb.Refusal(incarnation=incarnation, generation=generation, **more))
    return answer


def test_the_refusal_of_the_newest_start_counts() -> None:
    """A node that has missed the newest start still has that of an older one."""
    older = with_refusal(node(0, hold((0, 0), incarnation=255, generation=1)), 255, iteration=5, text="older")
    assert newest_refusal({0: older, 1: "can't be reached"}) == older.refusal
    newer = node(1, hold((0, 1), incarnation=0, generation=1))
    assert newest_refusal({0: older, 1: newer}) is None
    with_refusal(newer, 0, iteration=7, rank="rank 1", text="newer")
    assert newest_refusal({0: older, 1: newer}) == newer.refusal
    third = with_refusal(node(2), 0, iteration=7, rank="rank 0", text="newer")
    assert newest_refusal({0: older, 1: newer, 2: third}) == third.refusal
    empty = with_refusal(node(2), 9, generation=2, iteration=0)
    assert newest_refusal({0: older, 1: newer, 2: empty}) == empty.refusal, "a new run is newer"
    empty.discarded = 2
    assert newest_refusal({0: older, 2: empty}) is None, "`checkmate reset` has discarded it"
