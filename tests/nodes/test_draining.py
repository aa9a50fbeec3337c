"""`checkmate drain`, over real gRPC, while training runs: no shard is ever without a live holder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import yaml
from hypothesis import given

from checkmate.job.validation import data_of
from checkmate.nodes import draining
from checkmate.nodes.draining import NodeAway, NotDrained, Step, only_here
from checkmate.nodes.standing import Answers, beginning_of, newest_beginnings
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.logic import phases
from testbed.small_training import SmallTraining
from tests.support.cli import invoke
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.standings import JOB, all_holds, answers, hold, node
from tests.support.shadow.world import World, check_now, going_on
from tests.support.waiting import wait_until

SECONDS = 20.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as exit_stack:
        yield exit_stack


def trained(stack: ExitStack, *, nodes: int = 2, replicas: int = 2) -> tuple[World, SmallTraining, Stubs]:
    here = World(stack, nodes=nodes, replicas=replicas, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    stubs = Stubs(here.job, None)
    stack.callback(stubs.close)
    return here, training, stubs


def leave(
    stubs: Stubs, number: int, step: pb.LeaveRequest.Step.ValueType, token: bytes = b"one"
) -> pb.NodeStatus:
    request = pb.LeaveRequest(job=stubs.job.job, protocol=PROTOCOL, step=step, token=token)
    return stubs.to(number).Leave(request, timeout=5)


@needs_buffers
@pytest.mark.slow
def test_a_rolling_restart_loses_nothing(stack: ExitStack) -> None:
    here, training, stubs = trained(stack, nodes=3)
    with going_on(training):
        for number in range(3):
            assert draining.drain(here.job, stubs, number, SECONDS)
            assert here.status(number).left
            here.stop(number)
            here.start(number)
            training.begin([number])
        wait_until(lambda: all(here.is_ready(each_node) for each_node in here.nodes), "all nodes", SECONDS)
    check_now(here, training)


@needs_buffers
def test_a_node_leaves_once_another_one_holds_its_shards(stack: ExitStack) -> None:
    here, training, stubs = trained(stack)
    with going_on(training):
        assert draining.drain(here.job, stubs, 0, SECONDS) == [(0, 0), (0, 1)]
        answer = here.status(0)
        assert (answer.left, answer.holds_nothing, list(answer.holds)) == (True, True, [])
        assert phases.LEFT_TROUBLE in answer.trouble
        assert not here.nodes[0].node.resources
        assert draining.drain(here.job, stubs, 0, SECONDS) == [], "it may be repeated"
        with pytest.raises(NotDrained, match=r"shadow node 1 .* only live state of shard 0 of DP group 0"):
            draining.drain(here.job, stubs, 1, 0)
        with pytest.raises(grpc.RpcError, match="it was drained, and holds nothing until it is restarted"):
            training.begin([0])
    iteration = training.iteration + 1
    request = pb.ReserveRequest(job=here.job.job, iteration=iteration, seconds=10)
    assert stubs.to(1).Reserve(request, timeout=5).granted
    training.iterate()
    here.stepped(iteration)
    for shard in (0, 1):
        training.check(1, shard, iteration)


@needs_buffers
def test_holders_that_are_drained_at_the_same_time_do_not_both_leave(stack: ExitStack) -> None:
    here, training, stubs = trained(stack)
    with going_on(training):
        for _ in range(5):
            with ThreadPoolExecutor() as pool:
                drains = [pool.submit(draining.drain, here.job, stubs, number, 0) for number in (0, 1)]
            if drained := [number for number in (0, 1) if here.status(number).left]:
                break
            wait_until(lambda: all(map(here.is_ready, (0, 1))), "both to stay", SECONDS)
        assert len(drained) < 2
        assert any(each_drain.exception() is not None for each_drain in drains)


@needs_buffers
def test_a_node_that_nobody_tells_to_go_stays(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "UNDECIDED_SECONDS", 0.3)
    here, training, stubs = trained(stack)
    with going_on(training):
        answer = leave(stubs, 0, Step.ASK)
        assert [(status.live, status.offered) for status in answer.holds] == [(False, False)] * 2
        assert only_here({0: answer, 1: here.status(1)}, 1) == [(0, 0), (0, 1)]
        wait_until(lambda: all(status.live for status in here.status(0).holds), "node 0 to stay", SECONDS)
        with pytest.raises(grpc.RpcError, match="nobody has asked it to leave in time"):
            leave(stubs, 0, Step.GO)
        leave(stubs, 0, Step.ASK)
        leave(stubs, 0, Step.ASK, b"two")
        with pytest.raises(grpc.RpcError, match="nobody has asked it to leave in time"):
            leave(stubs, 0, Step.GO)  # another command has asked since
        assert all(status.live for status in leave(stubs, 0, Step.STAY).holds)
    check_now(here, training)


@needs_buffers
def test_a_restart_comes_first(stack: ExitStack) -> None:
    here, _, stubs = trained(stack)
    leave(stubs, 0, Step.ASK)
    stubs.to(0).Fence(pb.FenceRequest(job=here.job.job, protocol=PROTOCOL, timeout=5, drain=True), timeout=10)
    assert all(status.live for status in here.status(0).holds)
    with pytest.raises(NotDrained, match="training restarts"):
        draining.drain(here.job, stubs, 0, 0)
    assert draining.drain(here.job, stubs, 0, 0, force=True)
    assert here.status(0).left


@needs_buffers
def test_the_command(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "checkmate.cli.drain.keep_only", lambda *capabilities: None
    )  # for good, in this process
    here, _, _ = trained(stack, replicas=1)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data_of(here.job, exclude_none=True)))
    arguments = ("drain", file, "--insecure", "--timeout", "0.1")
    status, output = invoke(*arguments, "--id", "7")
    assert (status, "job demo has no shadow node 7; its ids are 0, 1" in output) == (2, True)
    began = time.monotonic()
    status, output = invoke(*arguments, "--id", "1")
    assert (status, "has the only live state of shard 1 of DP group 0; replicas: 2" in output) == (1, True)
    assert time.monotonic() - began < 5
    assert here.status(1).holds
    status, output = invoke(*arguments, "--id", "1", "--force", "--json")
    assert status == 0
    document = json.loads(output[output.index("{") :])
    assert document["held"] == [{"group": 0, "shard": 1}]
    here.stop(0)
    status, output = invoke(*arguments, "--id", "0")
    assert (status, "shadow node 0 (" in output) == (3, True)


def test_what_counts_as_a_holder() -> None:
    def both(**changes: object) -> Answers:
        return {0: node(0, hold()), 1: node(1, hold(**changes))}  # type: ignore[arg-type]

    assert only_here(both(), 0) == []
    assert only_here({0: node(0, hold()), 1: "can't be reached"}, 0) == [(0, 0)]
    behind, unconnected = {"stepped": 1, "in_full": 3}, {"streams": 4, "connected": 3}
    assert only_here(both(in_full=4), 0) == [], "statuses are not of the same moment"
    for changes in ({"offered": False}, {"incarnation": 2}, {"shard": (0, 1)}, behind, unconnected):
        assert only_here(both(**changes), 0) == [(0, 0)], changes
    assert only_here({0: node(0, hold(seeded=False)), 1: node(1)}, 0) == []
    assert only_here({0: node(0, hold(incarnation=2)), 1: node(1, hold((0, 1)))}, 0) == [], "an old state"
    with pytest.raises(NodeAway, match="can't be reached"):
        draining._own_answer(JOB, 0, {0: "can't be reached"})


@given(answers())
def test_what_is_left_can_be_read_elsewhere(answers_by_node: Answers) -> None:
    newest = newest_beginnings(all_holds(answers_by_node))
    for number, answer in answers_by_node.items():
        if isinstance(answer, str):
            continue
        rest = [
            hold_status
            for peer, peer_answer in answers_by_node.items()
            if peer != number
            for hold_status in getattr(peer_answer, "holds", ())
        ]
        offered = {(h.shard.group, h.shard.shard) for h in rest if h.offered and beginning_of(h) in newest}
        own_shards = {
            (h.shard.group, h.shard.shard) for h in answer.holds if h.seeded and beginning_of(h) in newest
        }
        assert own_shards <= offered | set(only_here(answers_by_node, number))
