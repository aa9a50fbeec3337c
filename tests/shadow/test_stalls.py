"""Nodes that stop for a while, and records that some of them lack: the iteration that a restart finds."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from checkmate.job.schema import Job
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.calls.fence import QUIET
from checkmate.shadow.clock import STALL, AwakeClock, Silence
from checkmate.shadow.replica.replica import Replica
from checkmate.training.start import fence
from checkmate.training.start.plans import FromNodes, RestartPlan
from testbed.copies import Copies, local_job
from testbed.small_training import SmallTraining, status
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.processes import NodeProcess, Start
from tests.support.shadow.world import World
from tests.support.waiting import wait_until

pytestmark = needs_buffers

SECONDS = 30.0


def planned(job: Job) -> RestartPlan:
    """Return the iteration from which a restart resumes."""
    stubs = Stubs(job, None)
    try:
        return fence.plan_restore(job, stubs, SECONDS)
    finally:
        stubs.close()


@contextmanager
def followed(job: Job, start: Start) -> Iterator[tuple[SmallTraining, list[NodeProcess]]]:
    """A training that all nodes of a job follow, each in its own process."""
    with ExitStack() as stack:
        nodes = [start(job, node.id, "--no-view") for node in job.shadow_nodes]
        for node in nodes:
            assert node.line().startswith("ready")
        copies = Copies(job)
        stack.callback(copies.close)
        training = SmallTraining(job, copies)
        stack.callback(training.close)
        ids = [node.id for node in job.shadow_nodes]
        training.begin(ids)
        training.seed_all()
        wait_until(lambda: all(hold.live for n in ids for hold in status(job, n).holds), "live", SECONDS)
        yield training, nodes


def test_a_node_that_was_quiet_for_long_enough_is_not_waited_for_again(start: Start) -> None:
    """A dead rank has left an incomplete iteration, which further reading does not complete."""
    with followed(local_job(nodes=1, ranks=2), start) as (training, _):
        training.iterate()
        for (boundary, channel, shard), layout in training.layouts.items():
            training.copies.send_tagged(
                (boundary, channel, shard), training.incarnation, layout.nbytes, b"part"
            )
        wait_until(lambda: not drained(training)[0], "that something has come in part", SECONDS)
        again, seconds = drained(training)
        assert not again
        assert seconds < QUIET


def drained(training: SmallTraining) -> tuple[bool, float]:
    """Return whether node 0 reports all sent iterations as stepped, and the time of its answer."""
    request = pb.FenceRequest(protocol=PROTOCOL, job=training.job.job, timeout=SECONDS, drain=True)
    began = time.monotonic()
    answer = training.stubs[0].Fence(request, timeout=SECONDS)
    return answer.drained, time.monotonic() - began


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("nodes", "stopped", "seconds"),
    [
        (2, 1, 2.0),
        pytest.param(2, 0, 2.0, marks=pytest.mark.slow),
        pytest.param(1, 0, 2.0, marks=pytest.mark.slow),
        pytest.param(2, 1, 7.0, marks=pytest.mark.slow),  # longer than any silence
        pytest.param(2, 0, 7.0, marks=pytest.mark.slow),
        pytest.param(3, 1, 25.0, marks=pytest.mark.slow),  # longer than gRPC's keepalive
    ],
)
def test_a_node_that_was_stopped_while_training_died_has_lost_nothing(
    start: Start, nodes: int, stopped: int, seconds: float
) -> None:
    job = local_job(nodes=nodes, ranks=2)
    with followed(job, start) as (training, processes):
        for _ in range(3):
            training.iterate()
        processes[stopped].process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            training.iterate()
            time.sleep(0.02)
        for line in training.lines.values():
            line.close()
        processes[stopped].process.send_signal(signal.SIGCONT)
        plan = planned(job)
        assert isinstance(plan, FromNodes) and plan.iteration == training.iteration, plan
        for node in range(nodes):
            training.check(node, node, plan.iteration)


@pytest.mark.parametrize("count", [1, 5])
def test_records_that_one_node_lacks_are_copied_from_another_at_a_restart(
    world: Callable[..., World], count: int
) -> None:
    here = world(nodes=2, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    for _ in range(count):
        training.iterate(records=[0])
    plan = planned(here.job)
    assert isinstance(plan, FromNodes) and plan.iteration == count, plan
    for node in (0, 1):
        training.check(node, node, count)


def test_what_was_trained_faster_than_nodes_step_is_stepped_before_a_restart(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets buffer everything beyond the two iterations in a node's buckets."""
    here = world(nodes=2, ranks=2, channels=2)
    training = here.started()
    step = Replica.step

    def slow(*arguments: Any) -> list[str]:
        time.sleep(0.02)
        return step(*arguments)

    monkeypatch.setattr(Replica, "step", slow)
    for _ in range(60):
        training.iterate()
    plan = planned(here.job)
    assert isinstance(plan, FromNodes) and plan.iteration == 59, plan
    for node in (0, 1):
        training.check(node, node, 59)


def test_a_process_that_was_stopped_has_not_waited_meanwhile() -> None:
    real = [100.0]
    clock = AwakeClock(lambda: real[0])
    real[0] += 0.1
    assert (clock.now(), clock.beat()) == (100.1, 0)
    real[0] += 60
    assert clock.now() == pytest.approx(100.1 + STALL)  # also before the first beat
    assert clock.beat() == pytest.approx(60 - STALL)
    assert clock.now() == pytest.approx(100.1 + STALL)
    real[0] += 0.2
    assert clock.beat() == 0
    assert clock.now() == pytest.approx(100.3 + STALL)


def test_silence_begins_anew_with_unread_data() -> None:
    """What was unread a moment ago may not have reached the counters yet."""
    silence = Silence()
    assert silence.since((1, 2), 5.0) == 5.0
    assert silence.since((1, 2), 6.0) == 5.0
    assert silence.since((1, 2), 7.0, unread=True) == 7.0
    assert silence.since((1, 2), 8.0) == 7.0
    assert silence.since((1, 3), 9.0) == 9.0
