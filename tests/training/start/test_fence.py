"""Planning a restart, over real gRPC: nodes that answer, nodes that do not, and incomplete state."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.nodes.other_ranks import ranks_digest
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.process import Serving
from checkmate.training.start import fence, plans
from checkmate.training.start.plans import FromNodes, NewRun, RefusedStart, WithoutState
from testbed.copies import local_job
from testbed.jobs import job_data
from testbed.ports import free_port
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.held_back import HeldBack
from tests.support.shadow.recording_node import RecordingNode
from tests.support.shadow.standings import hold, node
from tests.support.shadow.world import World, settle
from tests.support.shadow.world import fence as fenced

TIMEOUT = 20.0


@pytest.fixture
def served() -> Iterator[list[RecordingNode]]:
    nodes = [RecordingNode(), RecordingNode()]
    yield nodes
    for recording in nodes:
        recording.stop()


@pytest.fixture
def job(served: list[RecordingNode]) -> Job:
    return job_at([node.address for node in served])


@pytest.fixture
def stubs(job: Job) -> Iterator[Stubs]:
    job_stubs = Stubs(job, None)
    yield job_stubs
    job_stubs.close()


def job_at(addresses: list[str]) -> Job:
    data = job_data(ranks=2, nodes=len(addresses))
    for entry, address in zip(data["shadow_nodes"], addresses, strict=True):
        entry["mgmt"] = address
    return of_data(Job, data)


def test_nothing_is_held() -> None:
    """Real nodes' answers before any training."""
    job = local_job(ranks=2, nodes=2)
    with ExitStack() as stack:
        for number in range(2):
            stack.enter_context(Serving(job, number, receive_buffer=1 << 16))
        stubs = Stubs(job, None)
        stack.callback(stubs.close)
        plan = fence.plan_restore(job, stubs, TIMEOUT)
        another = fence.plan_restore(job, stubs, TIMEOUT)
    assert isinstance(plan, NewRun)
    assert 0 <= plan.incarnation < 256
    assert plan.run != another.run


def test_all_is_whole(served: list[RecordingNode], job: Job, stubs: Stubs) -> None:
    served[0].status = node(0, hold((0, 0), 6, 7))
    served[1].status = node(1, hold((0, 1), 6, 8))
    served[0].settled = node(0, hold((0, 0), 7, 7))
    served[1].settled = node(1, hold((0, 1), 7, 7))
    plan = fence.plan_restore(job, stubs, TIMEOUT)
    assert plan == FromNodes(incarnation=4, run="a", iteration=7, holders={(0, 0): [0], (0, 1): [1]})


def ranks_of(*groups: int, shards: int = 2) -> pb.JobRanks:
    """Return a job file's ranks: groups of these sizes."""
    numbers = iter(range(sum(groups)))
    return pb.JobRanks(
        groups=[
            pb.GroupRanks(
                ranks=[next(numbers) for _ in range(size)], hosts=[""] * size, shadow_nodes=range(shards)
            )
            for size in groups
        ],
        replicas=1,
    )


def test_state_of_other_ranks_is_refused_while_a_node_has_the_old_job_file(
    served: list[RecordingNode], job: Job, stubs: Stubs
) -> None:
    """At once, and without fencing: nothing is lost. A node that holds nothing may be used."""
    two, single = ranks_of(2, 2), ranks_of(2)
    served[0].status = pb.NodeStatus(node=0, holds_nothing=True, job_ranks=two)
    served[1].status = node(1, hold((0, 1), 6, 8))
    served[1].status.job_ranks.CopyFrom(two)
    plan = fence.plan_restore(job, stubs, 60)
    assert isinstance(plan, RefusedStart)
    assert plan.trouble.startswith(
        f"shadow node 1 ({served[1].address}) holds a state at iteration 6, and its job file has 2 DP groups "
        "of 2 ranks, but the job now has 1 DP group of 2 ranks. To go on with other ranks, copy the job file "
    )
    served[1].status.next_trouble = "its job file can't be read again"
    plan = fence.plan_restore(job, stubs, 60)
    assert isinstance(plan, RefusedStart)
    assert plan.trouble.endswith("of 2 ranks. its job file can't be read again")
    served[1].status.job_ranks.CopyFrom(single)
    assert fence.plan_restore(job, stubs, 0.5).kind == "none"


@pytest.mark.parametrize("taken_up", [(False, False), (True, True), (True, False)])
def test_state_of_other_ranks_is_planned(
    served: list[RecordingNode], job: Job, stubs: Stubs, taken_up: tuple[bool, bool]
) -> None:
    """Nodes may have followed the job file in a start that ended before all shards were there again."""
    before, now = ranks_of(3), ranks_of(2)
    for number, has_followed in enumerate(taken_up):
        state = node(number, hold((0, number), 6, 6))
        if has_followed:
            status = node(number, *([hold((0, 0), 6, 6, incarnation=5)] if not number else []))
            status.job_ranks.CopyFrom(now)
            status.former.CopyFrom(pb.FormerState(job_ranks=before, holds=state.holds))
        else:
            status = state
            status.job_ranks.CopyFrom(before)
            status.next_ranks.CopyFrom(now)
        served[number].status = served[number].settled = status
    plan = fence.plan_restore(job, stubs, 2)
    assert isinstance(plan, FromNodes)
    assert (plan.iteration, plan.former) == (6, before.SerializeToString())
    assert plan.holders == {(0, 0): [0], (0, 1): [1]}
    for recording in served:
        (request,) = recording.settles
        assert request.ranks_digest == ranks_digest(before)


def test_a_node_that_does_not_settle_has_nothing_to_give(
    served: list[RecordingNode], job: Job, stubs: Stubs
) -> None:
    served[0].status = node(0, hold((0, 0), 6, 7))
    served[1].status = node(1, hold((0, 1), 6, 8))
    served[0].settled = node(0, hold((0, 0), 7, 7))
    plan = fence.plan_restore(job, stubs, TIMEOUT)
    assert isinstance(plan, WithoutState)
    assert f"shard 1 of DP group 0: shadow node 1 ({job.node(1).mgmt}): holds nothing" in plan.trouble


def test_one_node_answers_nothing_and_the_other_is_away(
    served: list[RecordingNode], job: Job, stubs: Stubs
) -> None:
    """It may hold everything, so training does not begin."""
    served[1].stop()
    start = time.monotonic()
    plan = fence.plan_restore(job, stubs, 1.5)
    assert 1.4 < time.monotonic() - start < 10
    assert isinstance(plan, WithoutState)
    address = served[1].address
    assert f"shadow node 1 ({address}): can't be reached (Connection refused)" in plan.trouble
    assert f"shadow node 0 ({served[0].address}): holds nothing" in plan.trouble
    served[1].start()


def test_what_is_whole_without_the_missing_node_does_not_wait_long(
    served: list[RecordingNode], stubs: Stubs, job: Job
) -> None:
    served[0].status = node(0, hold((0, 0), 6, 7), hold((0, 1), 6, 7))
    served[0].settled = node(0, hold((0, 0), 7, 7), hold((0, 1), 7, 7))
    served[1].stop()
    start = time.monotonic()
    plan = fence.plan_restore(job, stubs, 60)
    assert time.monotonic() - start < 20
    assert isinstance(plan, FromNodes)
    assert plan.holders == {(0, 0): [0], (0, 1): [0]}
    served[1].start()


def test_a_stopped_node_that_goes_on_is_not_fenced_in_the_training_that_follows(
    served: list[RecordingNode],
) -> None:
    """Connections are kept for `protect`: the unanswered call must not arrive beside its `Begin`."""
    served[0].status = node(0, hold((0, 0), 6, 7), hold((0, 1), 6, 7))
    served[0].settled = node(0, hold((0, 0), 7, 7), hold((0, 1), 7, 7))
    with HeldBack(served[1].address) as stopped:
        job = job_at([served[0].address, stopped.address])
        with Stubs(job, None) as stubs:
            assert fence.plan_restore(job, stubs, 60).kind == "nodes"
            future = stubs.to(1).Begin.future(pb.BeginRequest(incarnation=4), timeout=20)
            stopped.go_on()
            future.result()
            time.sleep(0.2)
    assert len(served[1].begins) == 1
    assert served[1].fences == []


def test_a_node_that_is_up_again_is_reached_at_once(
    served: list[RecordingNode], job: Job, stubs: Stubs
) -> None:
    """The first call of `protect` does not fail because gRPC waits until it tries a lost node again."""
    served[1].stop()
    fence.plan_fresh(job, stubs, 0.5)
    served[1].start()
    stubs.to(1).Begin(pb.BeginRequest(incarnation=4), timeout=20)
    assert len(served[1].begins) == 1


def test_a_node_that_comes_late_is_waited_for(served: list[RecordingNode], job: Job, stubs: Stubs) -> None:
    served[0].status = node(0, hold((0, 0), 6, 7))
    served[0].settled = node(0, hold((0, 0), 7, 7))
    served[1].status = node(1, hold((0, 1), 6, 7))
    served[1].settled = node(1, hold((0, 1), 7, 7))
    served[1].stop()
    asking = fence.Fence(job, stubs, time.monotonic() + TIMEOUT)
    while not asking.failures:
        time.sleep(0.01)
    served[1].start()
    asking.wait(lambda: False)
    assert asking.complete
    asking.close()
    assert fence.plan_restore(job, stubs, TIMEOUT).kind == "nodes"


def test_trouble_of_a_hold_is_told(served: list[RecordingNode], job: Job, stubs: Stubs) -> None:
    doubtful = hold((0, 1), 6, 7, doubtful=True)
    doubtful.trouble = "body.weight differs after iteration 6"
    served[0].status = node(0, hold((0, 0), 6, 7))
    served[1].status = node(1, doubtful)
    plan = fence.plan_restore(job, stubs, TIMEOUT)
    assert isinstance(plan, WithoutState)
    shard = f"shard 1 of DP group 0: shadow node 1 ({served[1].address})"
    assert plan.trouble.endswith(f"{shard}: body.weight differs after iteration 6")


def test_what_a_node_says_once_it_has_settled_is_told(
    served: list[RecordingNode], job: Job, stubs: Stubs
) -> None:
    served[0].status = node(0, hold((0, 0), 6, 7))
    served[1].status = node(1, hold((0, 1), 6, 7))
    served[0].settled = node(0, hold((0, 0), 7, 7))
    served[1].settled = pb.NodeStatus(node=1, trouble=["body.weight differs after iteration 7"])
    plan = fence.plan_restore(job, stubs, TIMEOUT)
    assert isinstance(plan, WithoutState)
    assert plan.trouble.endswith("does not hold it; body.weight differs after iteration 7")
    assert "stepped iteration 6" not in plan.trouble


@needs_buffers
def test_a_restart_that_failed_is_no_beginning_the_next_time() -> None:
    """A hold is found doubtful while it settles, and dropped. The node reports it until training begins."""
    with ExitStack() as stack:
        here = World(stack, nodes=1, ranks=2)
        training = here.started()
        training.iterate()
        here.stepped(0)
        stubs = Stubs(here.job, None)
        stack.callback(stubs.close)
        node = here.nodes[0].node
        fenced(here, training)
        (hold,) = node.state.groups[0].holds
        hold.doubt.begin(0, -1)
        hold.trouble = "parameter p3 differs"
        assert not settle(here, training, 0)[0].holds
        for _ in range(2):
            plan = fence.plan_restore(here.job, stubs, TIMEOUT)
            assert isinstance(plan, WithoutState)
            assert "does not hold it; DP group 0, shard 0: dropped when a restart asked for" in plan.trouble
            assert "parameter p3 differs" in plan.trouble
        assert fence.plan_fresh(here.job, stubs, TIMEOUT).kind == "nothing"
        training.incarnation = plan.incarnation
        training.begin([0], run="second")
        assert not here.status(0).trouble


def test_beginning_anew_whatever_they_hold(served: list[RecordingNode], job: Job, stubs: Stubs) -> None:
    served[0].status = node(0, hold((0, 0), 6, 7, incarnation=255))
    plan = fence.plan_fresh(job, stubs, TIMEOUT)
    assert isinstance(plan, NewRun) and plan.incarnation == 0
    assert plan.run != "a"


def test_a_run_that_goes_on_keeps_its_generation_and_a_new_one_has_a_greater_one(
    served: list[RecordingNode], job: Job, stubs: Stubs
) -> None:
    served[0].status = node(0, hold((0, 0), 6, 7, generation=3))
    served[1].status = node(1, hold((0, 1), 6, 7, generation=3))
    served[1].status.generation = 5  # it has seen a generation of which nothing is left
    served[0].settled = node(0, hold((0, 0), 7, 7))
    served[1].settled = node(1, hold((0, 1), 7, 7))
    plan = fence.plan_restore(job, stubs, TIMEOUT)
    assert (plan.kind, plan.generation, plan.generation_seen) == ("nodes", 3, 5)
    assert plans.plan_without_state(plan.incarnation, "", plan.generation_seen).generation == 6
    assert fence.plan_fresh(job, stubs, TIMEOUT).generation == 6
    served[0].status = served[1].status = pb.NodeStatus(holds_nothing=True)
    plan = fence.plan_restore(job, stubs, TIMEOUT)
    assert (plan.kind, plan.generation) == ("nothing", 1)
    assert [plans.after_disk(plan, on_disk).generation for on_disk in (0, 4)] == [1, 5]


def test_a_node_of_another_job_is_an_error(served: list[RecordingNode], job: Job) -> None:
    """Real nodes refuse requests for another job."""
    changed_job = local_job(ranks=2, nodes=1)
    foreign_job = replace(changed_job, job="another")
    with Serving(foreign_job, 0, receive_buffer=1 << 16):
        stubs = Stubs(changed_job, None)
        plan = fence.plan_restore(changed_job, stubs, 1.0)
        stubs.close()
    assert isinstance(plan, WithoutState)
    assert "job another" in plan.trouble


@pytest.mark.parametrize("fresh", [False, True])
def test_why_the_last_start_was_refused_is_the_first_line(
    served: list[RecordingNode], job: Job, stubs: Stubs, caplog: pytest.LogCaptureFixture, fresh: bool
) -> None:
    """Once, although both nodes have it, and before a warning about what they lack."""
    for number, recording in enumerate(served):
        recording.status = node(number, hold((0, number), 6, 7))
        recording.status.refusal.CopyFrom(
            pb.Refusal(incarnation=3, iteration=7, rank="rank 0 (host-a)", text="a hook\nchanges p0")
        )
    served[0].status.holds.add(
        shard=pb.Shard(shard=1), incarnation=3, stepped=9, in_full=9, seeded=True, run="a"
    )
    caplog.set_level(logging.WARNING, "checkmate")
    if fresh:
        fence.plan_fresh(job, stubs, TIMEOUT)
    else:
        fence.plan_restore(job, stubs, TIMEOUT)
    reason = "the last start was refused in iteration 7 on rank 0 (host-a): a hook changes p0"
    assert caplog.messages[0] == reason
    assert caplog.messages.count(reason) == 1


def test_a_start_says_for_which_nodes_it_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_SILENT_SECONDS", 0.1)
    absent = job_at([f"127.0.0.1:{free_port()}"])
    job_stubs = Stubs(absent, None)
    with caplog.at_level(logging.WARNING, "checkmate"):
        fence.plan_restore(absent, job_stubs, 1.0)
    job_stubs.close()
    (text,) = [text for text in caplog.messages if text.startswith("waiting up to")]
    assert "Has `checkmate shadow JOB --id 0` been started there?" in text
