"""Nodes that offer a job's newest iteration, according to the nodes' answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.nodes.standing import (
    Answers,
    Beginning,
    Lacking,
    NoAnswer,
    Shard,
    beginning_of,
    holders_of,
    newest_beginnings,
    newest_incarnation,
)
from checkmate.nodes.target import Source, find_source
from checkmate.rpc import shadow_pb2 as pb
from testbed.jobs import job
from tests.support.shadow.standings import JOB, answers, hold, hold_of, newest, node


def status(*shards: Shard, **changes: Any) -> pb.NodeStatus:
    return node(0, *(hold(shard, 7, 7, **{"generation": 1, **changes}) for shard in shards))


def find(answers_by_node: Answers) -> Source | None:
    try:
        return find_source(JOB, answers_by_node)
    except Lacking:
        return None


@given(answers())
def test_all_is_of_one_start_and_good(answers_by_node: Answers) -> None:
    source = find(answers_by_node)
    if source is None:
        return
    assert source.holders.keys() == holders_of(JOB).keys()
    holds = [
        hold_of(answers_by_node, number, shard) for shard, nodes in source.holders.items() for number in nodes
    ]
    assert {beginning_of(each_hold) for each_hold in holds} == {source.beginning}
    assert not any(each_hold.doubtful for each_hold in holds)
    assert all((each_hold.seeded and each_hold.live) or each_hold.offered for each_hold in holds)
    assert source.stepped == max(each_hold.stepped for each_hold in holds)
    assert (source.beginning.generation, source.beginning.incarnation) == newest(answers_by_node)


@given(answers(), st.data())
def test_an_answer_more_takes_nothing_away(answers_by_node: Answers, data: st.DataObject) -> None:
    """Unless it has a newer start of training."""
    left_out = data.draw(st.sampled_from(sorted(answers_by_node)))
    fewer = {number: answer for number, answer in answers_by_node.items() if number != left_out}
    if newest(fewer) == newest(answers_by_node) and find(fewer) is not None:
        assert find(answers_by_node) is not None


@given(answers())
def test_what_is_lacking_is_named_with_every_node_that_should_hold_it(answers_by_node: Answers) -> None:
    try:
        find_source(JOB, answers_by_node)
    except Lacking as error:
        assert error.shards
        assert error.wrong <= error.shards.keys()
        for shard, troubles in error.shards.items():
            for number in holders_of(JOB)[shard]:
                assert any(trouble.startswith(f"shadow node {number} (") for trouble in troubles)


def test_who_is_asked() -> None:
    two_nodes = job(nodes=2, replicas=2)
    both = status((0, 0), (0, 1))
    source = find_source(two_nodes, {0: both, 1: both})
    assert dict(source.holders) == {(0, 0): (0, 1), (0, 1): (1, 0)}
    assert (source.beginning, source.stepped, source.nodes) == (Beginning(1, 3, "a", 0, b""), 7, (0, 1))
    source = find_source(two_nodes, {0: both, 1: "gone"})
    assert dict(source.holders) == {(0, 0): (0,), (0, 1): (0,)}


def test_who_lacks_buffers_is_asked_only_for_what_nobody_offers() -> None:
    two_nodes = job(nodes=2, replicas=2)
    late = status((0, 0), (0, 1), offered=False, lacks=1)
    source = find_source(two_nodes, {0: late, 1: status((0, 1))})
    assert dict(source.holders) == {(0, 0): (0,), (0, 1): (1,)}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("can't be reached", "can't be reached"),
        (None, "has not answered"),
        (pb.NodeStatus(holds_nothing=True), "holds nothing"),
        (status((0, 0)), "does not hold it"),
        (pb.NodeStatus(trouble=["given up"]), "does not hold it; given up"),
        (status((0, 1), incarnation=2, run="old"), "is still in incarnation 2, not 3"),
        (status((0, 1), incarnation=9, generation=0), "is still in generation 0, not 1"),
        (status((0, 1), offered=False, doubtful=True, trouble="p3 differs"), "p3 differs"),
        (status((0, 1), doubtful=True), "differs from the trainers' state"),
        (status((0, 1), offered=False, live=False), "is not live yet, at iteration 7"),
        (status((0, 1), offered=False, live=False, seeded=False), "is not seeded yet"),
    ],
)
def test_why_nobody_gives_a_shard(answer: Any, words: str) -> None:
    two_nodes = job(nodes=2)
    answers = {0: status((0, 0))} | ({1: answer} if answer else {})
    with pytest.raises(Lacking) as info:
        find_source(two_nodes, answers)
    assert str(info.value) == f"shard 1 of DP group 0: shadow node 1 ({two_nodes.node(1).mgmt}): {words}"
    behind = status((0, 1), trouble="5 iterations behind")
    assert find_source(two_nodes, {0: status((0, 0)), 1: behind}).holders[0, 1] == (1,)


def test_nobody_answers() -> None:
    with pytest.raises(NoAnswer, match=r"shard 0 of DP group 0: shadow node 0 \(.*\): away; shard 1 of"):
        find_source(job(nodes=2), {0: "away", 1: "away too"})


def test_starts_of_one_number_are_not_put_together() -> None:
    """Numbers wrap, and a node that was away may have begun a start that no other node knows."""
    two_nodes = job(nodes=2)
    answers = {0: status((0, 0)), 1: status((0, 1), run="b")}
    with pytest.raises(Lacking, match="is in another start of training, which has the same incarnation 3"):
        find_source(two_nodes, answers)
    whole = {0: status((0, 0), (0, 1), run="b"), 1: status((0, 1))}
    assert find_source(two_nodes, whole).beginning.run == "b"


def test_which_trouble_is_wrong_with_a_shard_itself() -> None:
    two_nodes = job(nodes=2)
    for changes, wrong in (({"doubtful": True, "trouble": "p3 differs"}, {(0, 1)}), ({"live": False}, set())):
        with pytest.raises(Lacking) as info:
            find_source(two_nodes, {0: status((0, 0)), 1: status((0, 1), offered=False, **changes)})
        assert info.value.wrong == wrong


@given(st.integers(0, 255), st.lists(st.integers(0, 127), min_size=1, max_size=5))
def test_the_newest_incarnation_counts_round(last: int, before: list[int]) -> None:
    assert newest_incarnation([(last - b) % 256 for b in [*before, 0]]) == last
    assert newest_incarnation([]) is None
    assert newest_beginnings([]) == []
