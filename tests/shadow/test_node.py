"""Shadow nodes with real gRPC and real sockets, followed through small trainings."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

import grpc
import pytest
from rich.console import Console

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.logic.announcements import PeerWatch
from checkmate.shadow.logic.commit import MIN_SILENCE
from checkmate.shadow.logic.effects import Log
from checkmate.shadow.logic.node_state import NodeState
from checkmate.shadow.logic.phases import Phase
from checkmate.shadow.view import StatusWatch, data, picture
from testbed.copies import local_job
from testbed.small_training import RUN
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World, check_now, fence, going_on, settle
from tests.support.waiting import wait_until

pytestmark = needs_buffers


@pytest.mark.parametrize(
    ("nodes", "ranks", "channels", "replicas"), [(1, 2, 1, 1), (2, 3, 2, 1), (3, 4, 1, 2), (2, 2, 2, 2)]
)
def test_every_iteration_is_the_trainers_own(
    world: Callable[..., World], nodes: int, ranks: int, channels: int, replicas: int
) -> None:
    here = world(nodes=nodes, ranks=ranks, channels=channels, replicas=replicas)
    training = here.started()
    for iteration in range(6):
        for node in here.nodes:
            reserved = training.stubs[node].Reserve(
                pb.ReserveRequest(job=here.job.job, iteration=iteration, seconds=10), timeout=5
            )
            assert reserved.granted
        assert training.iterate() == iteration
        here.stepped(iteration)
        for shard in range(here.job.shards(0)):
            for node in training.holders(shard):
                header = training.check(node, shard, iteration)
                assert [part.rng for part in header.record.parts] == [
                    b"rng %d of %d" % (iteration, position) for position in range(ranks)
                ]
    for node in here.nodes:
        assert [(hold.run, hold.trouble) for hold in here.status(node).holds] == [(RUN, "")] * replicas


def test_a_fence_where_one_node_has_all_of_an_iteration_and_another_has_not(
    world: Callable[..., World],
) -> None:
    """No node steps it, all settle at the previous one, and received parts of it are dropped."""
    here = world(nodes=2, ranks=2)
    training = here.started()
    for _ in range(3):
        training.iterate()
    here.stepped(2)
    training.iterate(records=[0])  # node 1 has the data, but no record
    wait_until(lambda: here.status(0).holds[0].in_full == 3, "in full")
    answers = fence(here, training)
    assert {n: (s.holds[0].stepped, s.holds[0].in_full) for n, s in answers.items()} == {0: (2, 3), 1: (2, 2)}
    assert all(status.fenced and not status.holds_nothing for status in answers.values())
    settled = settle(here, training, 2)
    for node, status in settled.items():
        assert [(hold.stepped, hold.connected) for hold in status.holds] == [(2, 0)]
        training.check(node, node, 2)  # for each call
        training.check(node, node, 2)


def test_the_live_view_shows_where_a_node_stands(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2, replicas=2)
    training = here.started()
    watch = StatusWatch(here.nodes[1].node)
    start = time.monotonic()
    for _ in range(2):
        training.iterate()
    here.stepped(1)
    seconds = time.monotonic() - start
    assert all(0 < here.status(node).pull_seconds < seconds for node in here.nodes)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(picture(*watch.see()))
    text = console.export_text()
    assert "shadow node 1, job demo" in text
    assert text.count("live") == 2
    assert "127.0.4.2" in text
    assert " B/s" in text or " kB/s" in text
    assert "memory" in text and "pull" in text and "step" in text
    status, rates = watch.see()
    status.behind.add(node=2, iterations=5)
    status.trouble.append("parameter [/]:smile: differs")
    console.print(picture(status, rates))
    assert "parameter [/]:smile: differs" in console.export_text(clear=False)
    assert "shadow node 2 is 5 iterations behind the last commit" in console.export_text()
    assert data(status, rates)["refusal"] is None
    status.refusal.iteration, status.refusal.rank, status.refusal.text = 12, "rank 0 (a)", "no"
    console.print(picture(status, rates))
    assert "training was refused in iteration 12 on rank 0 (a): no" in console.export_text()
    assert data(status, rates)["refusal"]["text"] == "no"  # type: ignore[index]
    fence(here, training)
    console.print(picture(*watch.see()))
    assert "fenced" in console.export_text()


def test_streams_that_break_together_are_one_line(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    here = world(nodes=1, ranks=2, channels=8)
    here.started()
    here.copies.refusing = True
    here.copies.disconnect(0)
    wait_until(lambda: "; reconnecting" in caplog.text and "; retrying" in caplog.text)
    lines = [line for line in caplog.messages if "; reconnecting" in line or "; retrying" in line]
    assert len(lines) <= 6  # 2, unless the machine is too busy to end all streams within half a second
    more = [re.search(r" \(and (\d+) more like this\)$", line) for line in lines]
    assert sum(int(match[1]) for match in more if match) >= 16, lines


def test_the_log_says_who_was_left_behind() -> None:
    state = NodeState(local_job(nodes=3, ranks=2), 0, 0.0, receive_buffer=1 << 20, grace=1.0)
    peers, logs = PeerWatch(), list[Log]()
    for behind in ({}, {2: 3}, {2: 2}, {}):
        state.committee.behind = behind
        logs += peers.announce_behind(state.committee)
    assert [log.message for log in logs] == [
        "shadow node 2 is 3 iterations behind, and does not count",
        "shadow node 2 has caught up",
    ]
    assert [log.event and log.event.name for log in logs] == ["peer.behind", "peer.back"]


@pytest.mark.parametrize("fenced", [0, 1])
def test_once_one_node_is_fenced_nobody_commits_what_it_lacks(
    world: Callable[..., World], fenced: int
) -> None:
    """The fence reaches the decider or a follower first; the other node has more, and waits."""
    here = world(nodes=2, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    here.nodes[fenced].node.state.grace = 60  # no gap is detected
    request = pb.FenceRequest(protocol=PROTOCOL, job=here.job.job, timeout=5)
    training.stubs[fenced].Fence(request, timeout=10)
    training.iterate(records=[1 - fenced])
    wait_until(lambda: here.status(1 - fenced).holds[0].in_full == 1, "in full")
    time.sleep(2 * MIN_SILENCE)
    assert here.status(1 - fenced).holds[0].stepped == 0
    fence(here, training)
    settle(here, training, 0)
    time.sleep(0.3)
    for node in (0, 1):
        training.check(node, node, 0)


def test_what_one_has_stepped_the_others_step_when_settling(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=3, channels=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    with here.nodes[1].node.state_changed:  # it does not receive the decision
        here.nodes[1].node.state.phase = Phase.FENCED
    training.iterate()
    wait_until(lambda: here.status(1).holds[0].in_full == 1, "in full")
    answers = fence(here, training)
    assert answers[1].holds[0].stepped == 0
    assert answers[1].holds[0].in_full == 1
    settle(here, training, 1)
    for node in (0, 1):
        training.check(node, node, 1)


def test_training_goes_on_from_where_the_nodes_settled(world: Callable[..., World]) -> None:
    """`keep` after a restart: nothing is sent again, and results equal those of a run without restart."""
    here = world(nodes=2, ranks=2)
    training = here.started()
    for _ in range(4):
        training.iterate()
    here.stepped(3)
    fence(here, training)
    settle(here, training, 3)
    old = training.begin_request()
    training.incarnation, training.first = 7, 4
    training.begin([0, 1], keep=True)
    here.ready()
    header = None
    for iteration in (4, 5):
        for node in (0, 1):
            request = pb.ReserveRequest(job=here.job.job, iteration=iteration, seconds=10)
            assert training.stubs[node].Reserve(request, timeout=5).granted
        training.iterate()
        here.stepped(iteration)
        for node in (0, 1):
            header = training.check(node, node, iteration)
    assert header is not None
    assert header.incarnation == 7
    with pytest.raises(grpc.RpcError, match="incarnation 0 is fenced"):
        training.stubs[0].Begin(old, timeout=5)  # a trainer that is dying


def test_a_record_goes_with_a_state_that_was_kept_or_seeded(world: Callable[..., World]) -> None:
    """After a second crash before the first iteration, the first record still exists."""
    here = world(nodes=1, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    fence(here, training)
    settle(here, training, 0)
    training.incarnation, training.first = 1, 1
    training.begin([0], keep=True)
    here.ready()
    fence(here, training)
    settle(here, training, 0)
    assert len(training.check(0, 0, 0).record.parts) == 2


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_gap_is_noticed_and_healed_while_training_goes_on(world: Callable[..., World], nodes: int) -> None:
    here = world(nodes=nodes, ranks=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    here.copies.lose(0, 5)
    with going_on(training):
        wait_until(lambda: not here.status(0).holds[0].live, "the gap")
        assert "not come" in here.status(0).holds[0].trouble
        here.ready()
    troubles = [reply.trouble for reply in training.lines[0, 0].replies]
    assert "it joins again at iteration" in max(troubles)
    here.stepped(training.iteration)
    training.iterate()
    wait_until(lambda: training.lines[0, 0].replies[-1].trouble == "", "the trainers are told")
    check_now(here, training)


def test_a_restarted_node_is_seeded_by_the_trainers_and_current_again(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2, channels=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    with going_on(training):
        here.stop(0)
        before = training.iteration
        wait_until(lambda: here.status(1).holds[0].stepped > before + 2, "the other one goes on")
        here.start(0)
        training.begin([0])
        here.ready()
    here.stepped(training.iteration)
    check_now(here, training)


def test_a_restarted_node_is_seeded_by_the_other_holder(world: Callable[..., World]) -> None:
    here = world(nodes=2, ranks=2, replicas=2)
    training = here.started()
    training.iterate()
    here.stepped(0)
    with going_on(training, seeds=False):
        here.stop(0)
        here.start(0)
        training.begin([0])
        here.ready()
    here.stepped(training.iteration)
    check_now(here, training)
