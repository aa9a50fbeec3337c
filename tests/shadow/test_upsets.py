"""Faults around a shadow node, and its reaction: it never serves wrong state."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.windows import SLICE_BYTES, Slices
from testbed.small_training import RUN, START, SmallTraining
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World, check_now, fence, going_on, settle
from tests.support.waiting import wait_until

pytestmark = needs_buffers


def test_streams_that_break_between_iterations_go_on_where_they_stood(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=3, channels=2)
    training = here.started()
    for _ in range(2):
        training.iterate()
    here.stepped(1)
    before = len(here.copies.hellos)
    here.copies.disconnect(0)
    streams = len(here.nodes[0].node.plans[0].streams)
    wait_until(lambda: len(here.copies.hellos) == before + streams, "all streams again")
    for node, hello in here.copies.hellos[before:]:
        key = (hello.boundary, hello.channel, hello.shadow_id)
        assert (node, hello.base) == (0, 2 * training.layouts[key].nbytes)
    check_now(here, training)
    assert here.status(0).holds[0].live


def test_a_stub_that_refuses_at_first_is_tried_again(world: Callable[..., World]) -> None:
    here = world(nodes=1, ranks=2)
    here.copies.refusing = True
    training = here.training()
    training.begin([0])
    training.seed_all()
    wait_until(lambda: bool(here.status(0).holds[0].seeded), "seeded")
    assert not here.status(0).holds[0].live
    here.copies.refusing = False
    here.ready()
    check_now(here, training)


def test_a_stub_that_resets_what_it_has_acknowledged_is_not_tried_without_a_pause(
    world: Callable[..., World],
) -> None:
    here = world(nodes=1, ranks=2)
    here.copies.resetting = True
    training = here.training()
    start = time.monotonic()
    training.begin([0])
    training.seed_all()

    def attempts() -> list[int]:
        return list(Counter((h.boundary, h.channel) for _, h in here.copies.hellos).values())

    wait_until(lambda: len(attempts()) == 2 * here.job.channels and min(attempts()) >= 3, "attempts")
    most = max(attempts())
    seconds = time.monotonic() - start
    pauses = itertools.accumulate([0, 0.1, 0.2, 0.4, 0.8, 1.6, *[2.0] * 10])
    assert most <= sum(after <= seconds for after in pauses)
    here.copies.resetting = False
    here.ready()
    check_now(here, training)


def test_streams_that_are_connected_too_late_are_joined_later(world: Callable[..., World]) -> None:
    """Training has continued without them: the node joins some iterations ahead, and is seeded."""
    here = world(nodes=1, ranks=2)
    here.copies.refusing = True
    training = here.training()
    training.begin([0])
    for _ in range(5):
        training.iterate()
    here.copies.refusing = False
    with going_on(training):
        here.ready()
    here.stepped(training.iteration)
    check_now(here, training)


def test_two_dp_groups_are_committed_together(world: Callable[..., World]) -> None:
    """A pipeline of two stages on two nodes: neither stage is stepped before both have an iteration."""
    here = world(nodes=2, ranks=2, groups=2)
    stages = [here.training(group=group, seed=group) for group in range(2)]
    for stage in stages:
        stage.begin([0, 1])
        stage.seed_all()
    here.ready()
    stages[0].iterate()
    wait_until(
        lambda: all(h.in_full == 0 for n in (0, 1) for h in here.status(n).holds if not h.shard.group),
        "one stage has all",
    )
    assert {hold.stepped for n in (0, 1) for hold in here.status(n).holds} == {-1}
    stages[1].iterate()
    here.stepped(0)
    for node in here.nodes:
        for stage in stages:
            request = pb.ReserveRequest(job=here.job.job, iteration=0, seconds=10)
            assert stage.stubs[node].Reserve(request, timeout=5).granted
            stage.check(node, node, 0)


def test_a_shard_without_parameters_follows_too(world: Callable[..., World]) -> None:
    here = world(nodes=3, ranks=2)
    training = here.started(shapes=((50,),))
    assert sorted(len(training.layout.of_shard(shard)) for shard in range(3)) == [0, 0, 1]
    for _ in range(3):
        check_now(here, training)
    fence(here, training)
    for status in settle(here, training, 2).values():
        assert [(hold.seeded, hold.stepped) for hold in status.holds] == [(True, 2)]


def spoiled(here: World) -> SmallTraining:
    """A training whose parameters were changed once outside a step, and a node that has detected it."""
    training = here.started()
    check_now(here, training)
    with torch.no_grad():
        for parameter in training.parameters:
            parameter.add_(1)
    for _ in range(len(training.parameters)):
        training.iterate()
    wait_until(lambda: here.status(0).holds[0].doubtful, "that it is found")
    return training


def test_a_wrong_gradient_is_found_by_comparing_and_nothing_is_offered_any_more(
    world: Callable[..., World],
) -> None:
    here = world(nodes=1, ranks=2)
    training = spoiled(here)
    (hold,) = here.status(0).holds
    assert not hold.offered
    assert "parameter p" in hold.trouble
    training.iterate()  # the reply to this one reports it, at the latest
    wait_until(lambda: any("parameter p" in r.trouble for r in training.lines[0, 0].replies), "told")
    request = pb.ReserveRequest(job=here.job.job, iteration=training.iteration + 1, seconds=10)
    assert not training.stubs[0].Reserve(request, timeout=5).granted
    fence(here, training)
    assert not settle(here, training, training.iteration)[0].holds


def test_a_hold_in_doubt_is_seeded_anew_and_offered_once_it_was_found_right(
    world: Callable[..., World],
) -> None:
    here = world(nodes=1, ranks=2)
    training = spoiled(here)
    resources = here.resources()
    with going_on(training):
        wait_until(lambda: resources.hold.live, "live again", 30)
        assert not here.status(0).holds[0].offered or not resources.hold.doubtful
        wait_until(lambda: here.status(0).holds[0].offered, "offered again", 30)
    here.stepped(training.iteration)
    (status,) = here.status(0).holds
    assert (status.doubtful, status.trouble) == (False, "")
    assert "DP group 0, shard 0: checkpoints of iterations 0 to 1 are doubtful" in here.status(0).trouble[0]
    check_now(here, training)
    assert not training.lines[0, 0].replies[-1].trouble


def test_a_hold_in_doubt_is_not_out_for_as_long_as_comparing_takes_to_come_round(
    world: Callable[..., World],
) -> None:
    """Trainers compare suspects first."""
    here = world(nodes=1, ranks=2)
    training = here.started(shapes=((512, 512), (40,)))
    training.slices = Slices(training.layout, training.parameters, training.optimizer)
    check_now(here, training)
    with torch.no_grad():
        training.parameters[0][0, 0] += 1
    resources = here.resources()
    cycle = 3 * 4 * 512 * 512 // SLICE_BYTES
    with going_on(training):
        wait_until(lambda: resources.hold.doubtful and resources.hold.live, "found in the next cycle", 30)
        live = training.iteration
        wait_until(
            lambda: here.status(0).holds[0].offered and not resources.hold.doubtful, "that it is over", 30
        )
    assert training.iteration - live < cycle // 2
    check_now(here, training)


def test_what_was_kept_while_in_doubt_is_not_served_once_the_doubt_is_over(
    world: Callable[..., World],
) -> None:
    here = world(nodes=1, ranks=2)
    training = here.started()
    check_now(here, training)
    request = pb.ReserveRequest(job=here.job.job, iteration=2, seconds=60)
    assert training.stubs[0].Reserve(request, timeout=5).granted
    with torch.no_grad():
        training.parameters[0][0, 0] += 1  # before iteration 1: this slice is compared after iteration 6
    while training.iteration < 5:
        here.stepped(training.iterate())
    training.iterate()
    resources = here.resources()
    wait_until(lambda: "found equal after iteration 0" in resources.hold.trouble, "that it is found")
    with going_on(training):
        wait_until(
            lambda: here.status(0).holds[0].offered and not resources.hold.doubtful, "that it is over", 30
        )
    with pytest.raises(grpc.RpcError, match="iteration 2 was found doubtful later"):
        training.fetch(0, 0, 2)
    assert [resources.hold.doubt.covers(iteration) for iteration in (0, 1, 6)] == [False, True, True]


def test_a_record_that_a_rank_has_dropped_is_a_gap(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2)
    training = here.started()
    check_now(here, training)
    training.iterate(records=[1])  # node 0 never gets this one
    with going_on(training):
        wait_until(lambda: not here.status(0).holds[0].live, "the gap")
        assert "passed over its record of iteration 1" in here.status(0).holds[0].trouble
        here.ready()
    here.stepped(training.iteration)
    check_now(here, training)


def test_a_hold_is_offered_once_it_has_all_buffers(world: Callable[..., World]) -> None:
    """A late node is live at once, and receives buffers a few at a time."""
    here = world(nodes=2, ranks=2)
    training = here.training()
    training.buffers = {"mean": torch.ones(2), "frozen": torch.ones(3)}
    training.begin([0, 1])
    training.seed_all()
    here.ready()
    assert {(h.offered, h.lacks_buffers) for n in (0, 1) for h in here.status(n).holds} == {(False, 2)}
    training.saying = ["mean", "frozen"]
    check_now(here, training)
    assert {(h.offered, h.lacks_buffers) for n in (0, 1) for h in here.status(n).holds} == {(True, 0)}
    training.saying = []
    here.stop(1)
    here.start(1)
    training.begin([1])
    with going_on(training):
        here.ready()
    here.stepped(training.iteration)
    (late,) = here.status(1).holds
    assert (late.live, late.offered, late.lacks_buffers) == (True, False, 2)
    for name, lacks in (("mean", 1), ("frozen", 0)):
        training.saying = [name]
        check_now(here, training)
        (late,) = here.status(1).holds
        assert (late.offered, late.lacks_buffers) == (not lacks, lacks)
    (early,) = here.status(0).holds
    assert early.offered


def test_buffers_given_at_the_start_make_the_first_iteration_whole(world: Callable[..., World]) -> None:
    """With one shard, a few at a time; records repeat them only if they change."""
    here = world(nodes=2, ranks=2, replicas=2)
    training = here.training()
    training.buffers = {"mean": torch.ones(2), "frozen": torch.ones(3)}
    training.begin([0, 1])
    for name, tensor in training.buffers.items():
        record = pb.IterationRecord(iteration=-1, buffers={name: state.dumps(tensor)})
        for node in (0, 1):
            header = pb.SeedHeader(
                start=START, job=here.job.job, run=RUN, iteration=-1, shard=pb.Shard(shard=1), record=record
            )
            assert not training.stubs[node].Seed(state.to_seeds(header, ()), timeout=5).again
    training.seed_all()
    here.ready()
    assert {(h.offered, h.lacks_buffers) for n in (0, 1) for h in here.status(n).holds} == {(True, 0)}
    check_now(here, training)
    training.buffers["mean"] = torch.zeros(2)
    training.saying = ["mean"]
    check_now(here, training)
    fence(here, training)
    settle(here, training, 1)
    for node, shard in ((0, 0), (0, 1), (1, 0), (1, 1)):
        buffers = training.check(node, shard, 1).record.buffers
        assert {name: state.loads(data).tolist() for name, data in buffers.items()} == {
            "mean": [0.0] * 2,
            "frozen": [1.0] * 3,
        }


def test_buffers_of_a_record_that_was_dropped_are_asked_for_again(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2, replicas=2)
    training = here.training()
    training.buffers = {"mean": torch.ones(2)}
    training.saying = ["mean"]
    training.begin([0, 1])
    training.seed_all()
    here.ready()
    check_now(here, training)
    training.saying = []
    training.iterate(records=[1])  # node 0 never gets this one
    with going_on(training):
        replies = training.lines[0, 0].replies
        wait_until(lambda: any(reply.buffers for reply in replies), "the question")
        wait_until(lambda: not here.status(0).holds[0].live, "the gap")
        here.ready()
    here.stepped(training.iteration)
    assert sum(reply.buffers for reply in replies) == 1
    check_now(here, training)  # another holder has sent them


def test_a_node_comes_back_in_the_midst_and_again_in_the_midst_of_that(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2, replicas=2, channels=2)
    training = here.started()
    with going_on(training):
        for node in (1, 0, 1):
            here.stop(node)
            here.start(node)
            training.begin([node])
            wait_until(lambda: len(here.status(1 - node).holds) == 2, "the other")  # noqa: B023
        here.ready()
    here.stepped(training.iteration)
    check_now(here, training)


def test_reading_goes_on_while_a_step_takes_long(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make a step hang: the next iteration is received completely meanwhile, the one after it waits."""
    here = world(nodes=1, ranks=2)
    training = here.started()
    go_on, stepping = threading.Event(), threading.Event()
    resources = here.resources()
    real = resources.replica.step

    def slow(*arguments: Any) -> list[str]:
        stepping.set()
        assert go_on.wait(20)
        return real(*arguments)

    monkeypatch.setattr(resources.replica, "step", slow)
    training.iterate()
    assert stepping.wait(10)
    training.iterate()
    training.iterate()
    wait_until(lambda: resources.hold.in_full == 1, "the next iteration")
    wait_until(lambda: any(inlet.paused for inlet in resources.inlets), "the pause")
    assert here.status(0).holds[0].stepped == -1
    assert resources.hold.in_full == 1
    go_on.set()
    here.stepped(2)
    check_now(here, training)


def test_a_node_that_lags_says_so(world: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    here = world(nodes=1, ranks=2)
    training = here.started()
    resources = here.resources()
    with caplog.at_level(logging.INFO, "checkmate"):
        with resources.lock:  # like a long step
            for _ in range(4):
                training.iterate()
            wait_until(lambda: "4 iterations behind the trainers" in resources.hold.trouble, "the lag")
            assert resources.hold.lag_said
        here.stepped(3)
        wait_until(lambda: not resources.hold.trouble, "that it is over")
    messages = [record.getMessage() for record in caplog.records]
    assert any("a restart must first step all of them" in line for line in messages)
    assert any("at most one iteration behind" in line for line in messages)


def test_two_fences_and_two_settles_are_as_one(world: Callable[..., World]) -> None:
    """Rank 0 dies in the middle of a restart, and another start repeats it."""
    here = world(nodes=2, ranks=2)
    training = here.started()
    check_now(here, training)
    first = fence(here, training)
    assert {n: s.holds[0].in_full for n, s in fence(here, training).items()} == {
        n: s.holds[0].in_full for n, s in first.items()
    }
    settle(here, training, 0)
    fence(here, training)
    for node, status in settle(here, training, 0).items():
        assert [(hold.stepped, hold.run) for hold in status.holds] == [(0, RUN)]
        training.check(node, node, 0)


def test_a_hold_of_another_run_or_beyond_the_target_is_emptied(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2)
    training = here.started()
    for _ in range(2):
        check_now(here, training)
    fence(here, training)
    request = pb.SettleRequest(job=here.job.job, iteration=1, run="another", continues=START)
    assert not training.stubs[0].Settle(request, timeout=10).holds
    beyond = pb.SettleRequest(job=here.job.job, iteration=0, run=RUN, continues=START)
    assert not training.stubs[1].Settle(beyond, timeout=10).holds


def test_a_record_given_with_seeds_is_served_with_them(world: Callable[..., World]) -> None:
    """A node that was seeded with a restored iteration can serve all of it."""
    here = world(nodes=1, ranks=2)
    training = here.training()
    training.begin([0])
    part = pb.RecordPart(iteration=-1, position=0, rng=b"then")
    record = pb.IterationRecord(iteration=-1, parts=[part], buffers={"mean": state.dumps(torch.ones(2))})
    header = pb.SeedHeader(
        start=START, job=here.job.job, run=RUN, iteration=-1, shard=pb.Shard(), record=record
    )
    now = training.states[-1]
    header.parameters.extend(now)
    training.stubs[0].Seed(state.to_seeds(header, ((n, *v) for n, v in now.items())), timeout=5)
    here.ready()
    fence(here, training)
    settle(here, training, -1)
    assert training.check(0, 0, -1).record == record
