"""Rare orders of events around a shadow node, each produced deliberately."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch

from checkmate import state
from checkmate.job.addresses import split_address
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.calls import fence as restarting
from checkmate.shadow.calls.fence import QUIET, QUIET_AGAIN
from checkmate.shadow.logic.commit import NEVER, Committee
from checkmate.shadow.logic.group import CallRefused, reusable
from checkmate.shadow.logic.hold import Hold, Stepped
from checkmate.shadow.logic.phases import Phase
from checkmate.shadow.logic.records import Records
from checkmate.shadow.node import TICK, Node
from checkmate.shadow.peers import Peers
from checkmate.shadow.replica.replica import ReplicaError
from checkmate.shadow.resources import HoldResources
from testbed.small_training import RUN, START
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World, check_now, fence, going_on, settle
from tests.support.waiting import wait_until

pytestmark = needs_buffers


def test_silence_before_a_restart_counts(world: Callable[..., World]) -> None:
    """A dead rank has left an incomplete iteration. The restart waits for more, unless it was long ago."""
    here = world(nodes=1, ranks=2)
    training = here.started()
    check_now(here, training)
    node = here.nodes[0].node

    def send_part() -> None:
        before = [reader.bytes for reader in node.source.readers]
        for (boundary, channel, shard), layout in training.layouts.items():
            position = layout.nbytes * (training.iteration + 1 - training.first)
            training.copies.send_tagged((boundary, channel, shard), training.incarnation, position, b"part")
        wait_until(lambda: [reader.bytes for reader in node.source.readers] != before, "a part")

    def drain() -> float:
        node.state.phase = Phase.OPEN
        assert not restarting.drain(node, here.job.job, 30).drained
        return time.monotonic()

    began = time.monotonic()
    send_part()
    assert drain() - began >= QUIET
    time.sleep(QUIET + TICK)
    began = time.monotonic()
    assert QUIET_AGAIN <= drain() - began < QUIET


def test_a_late_fence_leaves_the_next_incarnation_alone(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fence that still reads when training restarts, and one whose caller is gone."""
    begin_event, since = threading.Event(), Node.silent_since

    def silent_since(node: Node, **unread: bool) -> float:
        return since(node, **unread) if begin_event.is_set() else node.now()

    monkeypatch.setattr(Node, "silent_since", silent_since)
    here = world(nodes=1, ranks=2)
    training = here.started()
    check_now(here, training)
    node = here.nodes[0].node
    request = pb.FenceRequest(protocol=PROTOCOL, job=here.job.job, timeout=30)
    late = training.stubs[0].Fence.future(request, timeout=40)
    wait_until(lambda: node.state.fenced, "fenced")
    training.incarnation, training.first = 1, 1
    training.begin([0], run="second")
    begin_event.set()
    with pytest.raises(grpc.RpcError, match="incarnation 1 has begun in the meantime, and is not fenced"):
        late.result()
    with pytest.raises(CallRefused, match="the caller is gone"):
        restarting.fence(node, here.job.job, 5, lambda: False)
    training.seed_all()
    here.ready()
    check_now(here, training)


def test_another_holder_is_asked_for_nothing_where_trainers_were_faster(
    world: Callable[..., World],
) -> None:
    """An empty list of parameters would mean all of them."""
    here = world(nodes=2, ranks=2, replicas=2)
    training = here.started()
    check_now(here, training)
    group = here.nodes[0].node.state.groups[0]
    assert group.holds[0].wanted_parameters() == []
    assert not here.nodes[0]._copier._piece(1, group, group.holds[0])
    reserved = here.nodes[1].node.state.reserved
    wait_until(lambda: not any(len(ends) > 1 for ends in reserved.values()), "the release")


def test_the_parts_of_the_last_step_stay_until_they_are_kept() -> None:
    records = Records(1, 0)
    for t in (0, 1, 2):
        records.add(pb.RecordPart(iteration=t), 0.0)
    records.forget([1], {})
    records.keep(1)
    assert records.served(1).parts
    records.keep(0)
    assert not records.served(0).parts


def between_step_and_record(
    monkeypatch: pytest.MonkeyPatch, resources: HoldResources, event: Callable[[], None]
) -> None:
    """An event occurs when a step is done but its record is not kept yet."""
    real = resources.step

    def step(*arguments: Any) -> Stepped:
        stepped = real(*arguments)
        event()
        return stepped

    monkeypatch.setattr(resources, "step", step)


def join_again(node: Node, hold: Hold, iteration: int) -> None:
    """Return the state as after a gap."""
    with node.state_changed:
        hold.join(iteration)
        node.resources[hold].join()
        node.state.forget()


def test_a_record_survives_a_gap_between_a_step_and_its_keeping(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(nodes=1, ranks=2)
    training = here.started()
    node = here.nodes[0].node
    group, resources = node.state.groups[0], here.resources()
    joined_again = threading.Event()

    def gap() -> None:
        join_again(node, resources.hold, 5)
        joined_again.set()

    between_step_and_record(monkeypatch, resources, gap)
    training.iterate()
    assert joined_again.wait(5)
    wait_until(lambda: resources.hold.stepping is None, "the record")
    assert group.records.served(0).parts


def test_after_a_gap_the_last_good_state_is_restored_with_its_record(world: Callable[..., World]) -> None:
    here = world(nodes=1, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    node = here.nodes[0].node
    for _, hold in node.state.holds:
        join_again(node, hold, 5)
    assert {hold.stepped for hold in fence(here, training)[0].holds} == {0}
    settle(here, training, 0)
    for shard in range(here.job.shards(0)):
        assert training.check(0, shard, 0).record.parts


def test_a_hold_that_cannot_step_is_taken_out_and_seeded_anew(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged once, and the hold does not stay in doubt; the other node continues meanwhile."""
    here = world(nodes=2, ranks=2)
    training = here.started()
    resources = here.resources()
    real: Callable[..., list[str]] = resources.replica.step
    tries = []

    def step(iteration: int, *arguments: Any) -> list[str]:
        tries.append(iteration)
        if iteration == 0:
            raise ReplicaError("a gradient is missing")
        return real(iteration, *arguments)

    monkeypatch.setattr(resources.replica, "step", step)
    training.iterate()
    wait_until(lambda: not resources.hold.live, "that it is out")
    assert "a gradient is missing" in resources.hold.trouble
    assert not resources.hold.seeded
    with going_on(training):
        wait_until(lambda: resources.hold.live, "live again")
    assert tries.count(0) == 1
    here.stepped(training.iteration)
    check_now(here, training)


def test_buffers_that_cannot_be_read_stop_no_step(world: Callable[..., World]) -> None:
    """They are listed in the node's troubles, and the node continues."""
    here = world(nodes=1, ranks=2)
    training = here.started()
    training.iteration += 1
    training.send(training._gradients())
    training.optimizer.step()
    training._note()
    for position in range(training.ranks):
        part = training.part(position)
        part.buffers = b"no archive"
        training.lines[0, position].send(part)
    here.stepped(0)
    assert "buffers of iteration 0" in "".join(here.status(0).trouble)
    check_now(here, training)


@pytest.mark.parametrize("method", ["due_steps", "forget", "tick"])
def test_threads_survive_what_should_not_happen(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    here = world(nodes=1, ranks=2)
    training = here.started()
    node = here.nodes[0].node.state
    real = getattr(node, method)
    failed: list[bool] = []

    def once(*arguments: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("a fault of ours")
        return real(*arguments)

    monkeypatch.setattr(node, method, once)
    wait_until(
        lambda: any("a fault of ours" in trouble for trouble in here.status(0).trouble), "that it is said"
    )
    check_now(here, training)


def test_a_fenced_node_stays_with_its_answer(world: Callable[..., World]) -> None:
    """Later data is not reported to others, which would step beyond it, until the next call."""
    here = world(nodes=1, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    node = here.nodes[0].node
    assert [hold.in_full for hold in fence(here, training)[0].holds] == [0]
    training.iterate()
    resources, records = here.resources(), node.state.groups[0].records
    wait_until(lambda: all(i.iteration == 2 for i in resources.inlets) and records.complete(1), "all")
    node.touch()
    assert (resources.hold.in_full, node.state.committee.progress.in_full) == (0, 0)
    assert [hold.in_full for hold in fence(here, training)[0].holds] == [1]


def test_a_settled_group_that_has_not_begun_again_holds_no_other_up(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2, groups=2)
    trainings = [here.training(group=group, seed=group) for group in (0, 1)]
    for training in trainings:
        training.begin(list(here.nodes))
        training.seed_all()
    here.ready()
    for training in trainings:
        training.iterate()
    here.stepped(0)
    fence(here, trainings[0])
    settle(here, trainings[0], 0)
    first = trainings[0]
    first.incarnation, first.first = 1, 1
    first.begin(list(here.nodes), keep=True)
    holds = [hold for serving in here.nodes.values() for hold in serving.node.state.groups[0].holds]
    wait_until(lambda: all(hold.live for hold in holds), "live")
    first.iterate()
    wait_until(lambda: all(hold.stepped == 1 for hold in holds), "stepped 1")


def test_only_a_settled_hold_goes_on_in_a_new_incarnation(world: Callable[..., World]) -> None:
    """The replica of another hold may be in the middle of a step."""
    here = world(nodes=1, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    old = here.nodes[0].node.state.groups[0]
    training.incarnation, training.first = 1, 1
    request = training.begin_request(keep=True)
    assert not reusable(old, request, training.layout)
    fence(here, training)
    settle(here, training, 0)
    assert list(reusable(old, request, training.layout)) == old.holds
    (group,) = request.optimizer.groups
    group.options = group.options.replace('"lr": 0.01', '"lr": 0.02')
    assert list(reusable(old, request, training.layout)) == old.holds


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 7},  # on which results of 16-bit parameters depend
        {"default_dtype": "float64"},
        {"name": "torch.optim.Adam"},
        {"groups": [pb.ParamGroup(options='{"foreach": true}')]},
    ],
    ids=str,
)
def test_a_hold_that_would_step_otherwise_is_seeded_anew(
    world: Callable[..., World], change: dict[str, Any]
) -> None:
    here = world(nodes=1, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    fence(here, training)
    settle(here, training, 0)
    training.incarnation, training.first = 1, 1
    request = training.begin_request(keep=True)
    request.optimizer.MergeFrom(pb.OptimizerSpec(**change))
    assert not reusable(here.nodes[0].node.state.groups[0], request, training.layout)


@pytest.mark.parametrize("start_changes", [{"run": "second"}, {"start": b"the second start", "keep": True}])
def test_another_start_of_training_with_the_same_incarnation_is_told_apart(
    world: Callable[..., World], start_changes: dict[str, Any]
) -> None:
    """The node has missed the fence, and incarnations have wrapped."""
    here = world(nodes=2, ranks=2)
    before = here.started()
    for _ in range(4):
        before.iterate()
    here.stepped(3)
    after = here.training(seed=7)
    after.begin([0, 1], **start_changes)
    after.seed_all()
    here.ready()
    assert {hold.stepped for node in (0, 1) for hold in here.status(node).holds} == {-1}
    check_now(here, after)
    after.begin([0, 1], **start_changes)  # said again
    check_now(here, after)


def test_a_group_of_an_earlier_start_has_no_say_in_the_present_one(world: Callable[..., World]) -> None:
    here = world(nodes=1, ranks=2, groups=2)
    stages = [here.training(group=group, seed=group) for group in range(2)]
    for stage in stages:
        stage.begin([0])
        stage.seed_all()
    here.ready()
    for _ in range(3):
        for stage in stages:
            stage.iterate()
    here.stepped(2)
    again = here.training(group=0)
    again.begin([0], start=b"the second start")
    node = here.nodes[0].node
    assert (node.state.committee.start, node.state.committee.committed) == (b"the second start", NEVER)
    node.touch()
    assert node.state.committee.progress.stepped == NEVER


@needs_buffers
def test_a_process_that_still_listens_while_it_dies_is_out_soon(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(nodes=2, replicas=2)
    here.started()
    connect, probes = socket.create_connection, itertools.count()

    def dying(address: tuple[str, int], *rest: Any, **more: Any) -> socket.socket:
        if address != split_address(here.job.node(1).mgmt) or next(probes):
            return connect(address, *rest, **more)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", dying)
    here.stop(1)
    wait_until(lambda: 1 in here.nodes[0].node.state.committee.reporters()[0], "node 1 to be out")
    assert next(probes) > 1  # else it was silence, which takes seconds


def test_an_old_commit_stream_that_ends_late_changes_nothing(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2)
    node = here.nodes[0].node
    here.stop(1)
    peers = Peers(node)
    with node.state_changed:
        node.state.committee = Committee(0, [0, 1], 5, time.monotonic())
    peer = node.state.committee._higher[1]
    go_on = [threading.Event(), threading.Event()]

    def reports(index: int) -> Iterator[pb.Progress]:
        yield pb.Progress(job="demo", protocol=PROTOCOL, node=1, incarnation=5, in_full=index, live=True)
        assert go_on[index].wait(5)

    streams = []
    for index in (0, 1):
        stream = threading.Thread(target=peers._hear, args=(reports(index), threading.Event(), []))
        stream.start()
        streams.append(stream)
        wait_until(lambda: peer.progress is not None and peer.progress.in_full == index, "heard")  # noqa: B023
    go_on[0].set()
    streams[0].join()
    assert not peer.is_gone
    go_on[1].set()
    streams[1].join()
    assert peer.is_gone


def test_a_stream_two_gb_behind_is_lost_at_once(world: Callable[..., World]) -> None:
    """At its 32-bit position the switch would send later data."""
    here = world(nodes=1, ranks=2)
    here.started()
    group = here.nodes[0].node.state.groups[0]
    hold = group.holds[0]
    plan = hold.streams[0].plan
    with here.nodes[0].node.state_changed:
        for behind, is_lost in (((1 << 31) - 1, False), (1 << 31, True)):
            group.records.ends[plan.sender, plan.channel, plan.shard] = hold.streams[0].position + behind
            assert bool(hold.gap(group.records, time.monotonic(), 60)) == is_lost


def test_seeds_that_come_late_leave_a_live_hold_alone(world: Callable[..., World]) -> None:
    here = world(nodes=1, ranks=2)
    training = here.started()
    check_now(here, training)
    resources = here.resources()
    number = resources.hold.parameters[0]
    tensor, values = training.states[0][number]
    assert here.nodes[0].node.load(resources.hold, 5, {number: (torch.zeros_like(tensor), values)}) == []
    assert resources.replica.at[number] == 0
    check_now(here, training)


def test_seeds_that_come_late_leave_a_settled_hold_alone(world: Callable[..., World]) -> None:
    """A dying trainer's seeds may still arrive; the state promised to a restart does not change."""
    here = world(nodes=1, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    fence(here, training)
    settle(here, training, 0)
    resources = here.resources()
    resources.hold.live = False  # like one that had a gap before, and has the requested iteration
    number = resources.hold.parameters[0]
    tensor, values = training.states[0][number]
    assert here.nodes[0].node.load(resources.hold, 5, {number: (torch.zeros_like(tensor), values)}) == []
    training.check(0, 0, 0)


def test_settling_ends_if_a_step_changes_nothing(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if training restarts between two of its steps."""
    here = world(nodes=1, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    fence(here, training)
    node = here.nodes[0].node
    monkeypatch.setattr(node, "step", lambda steps: None)
    node.state.groups[0].holds[0].in_full = 2
    assert not settle(here, training, 2)[0].holds


def test_seeds_of_another_shape_are_refused(world: Callable[..., World]) -> None:
    here = world(nodes=1, ranks=2)
    training = here.training()
    training.begin([0])
    header = pb.SeedHeader(start=START, job=here.job.job, run=RUN, iteration=-1, parameters=[0])
    seeds = state.to_seeds(header, [(0, torch.zeros(3), {})])
    with pytest.raises(grpc.RpcError, match="its seed has") as info:
        training.stubs[0].Seed(seeds, timeout=5)
    assert info.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_fetch_waits_for_the_record_too(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(nodes=1, ranks=2)
    training = here.started()
    resources = here.resources()
    stepped, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        stepped.set()
        assert go_on.wait(5)

    between_step_and_record(monkeypatch, resources, pause)
    request = pb.ReserveRequest(job=here.job.job, iteration=0, seconds=10)
    assert training.stubs[0].Reserve(request, timeout=5).granted
    training.iterate()
    assert stepped.wait(5)
    threading.Timer(0.2, go_on.set).start()
    assert training.check(0, resources.hold.plan.shard, 0).record.parts


def test_iterations_that_are_left_out_again_count_once(world: Callable[..., World]) -> None:
    """A hold joins at an iteration which a rank then leaves out, too, and each rank leaves out its own."""
    here = world(nodes=1, ranks=2)
    here.started()
    resources = here.resources()
    resources.inlets[0].left_out = range(21, 39)
    assert [resources.count_left_out() for _ in range(2)] == [18, 18]
    resources.inlets[0].left_out = range(31, 44)
    resources.inlets[-1].left_out = range(43, 45)
    assert resources.count_left_out() == 24
    assert {hold.left_out for hold in here.status(0).holds} >= {24}
