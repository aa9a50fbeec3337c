"""A rank and its shadow nodes: refusals, what it logs of their answers, and the wait for the last step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn

from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from checkmate.nodes.stubs import Stubs
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL, REFUSAL_MAX
from checkmate.shadow.process import Serving
from checkmate.training.errors import RefusedError
from checkmate.training.exclusion import StepExclusion
from checkmate.training.lines.line import ATTENTIVE
from checkmate.training.lines.seeder import SeedSource, values_of
from checkmate.training.record.buffers import Buffers
from checkmate.training.start import followers as following
from checkmate.training.start.followers import Followers, Opening, Repair, filled_shards
from checkmate.training.start.places import Place, Start
from checkmate.training.start.plans import plan_without_state
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from testbed.copies import local_job
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.recording_node import RecordingNode
from tests.support.waiting import wait_until

LAYOUT = make_layout([Parameter("w", (4,), "float32")], 1)


@pytest.fixture
def nodes() -> Iterator[list[RecordingNode]]:
    served = [RecordingNode(), RecordingNode()]
    yield served
    for node in served:
        node.stop()


@pytest.fixture
def job(nodes: list[RecordingNode]) -> Job:
    data = data_of(local_job(nodes=2, ranks=2), exclude_none=True)
    for described, node in zip(data["shadow_nodes"], nodes, strict=True):
        described["mgmt"], described["records"] = node.address, node.records_at
    return of_data(Job, data)


class FollowedRank(Followers):
    """The followers of a rank, and the number of answers of its nodes that it has handled."""

    handled = 0

    def _replied(self, node: int, reply: pb.RecordReply) -> None:
        super()._replied(node, reply)
        self.handled += 1

    def train(self, iteration: int) -> None:
        """Send a record, and wait until the answers to it have been handled, as to each of the first 16."""
        before, plan = self.handled, self._opening.start.plan
        part = pb.RecordPart(
            job=self._place.job.job,
            incarnation=plan.incarnation,
            run=plan.run,
            start=plan.start,
            iteration=iteration,
        )
        for line in self.lines:
            line.send(iteration, part.SerializeToString())
        wait_until(lambda: self.handled == before + len(self.lines))


@contextmanager
def followed(
    job: Job, position: int = 0, start: Start | None = None, repair: Repair | None = None
) -> Iterator[FollowedRank]:
    """Yield the followers of a rank whose lines are up, without a process group."""
    model = nn.Linear(4, 1, bias=False)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    opening = Opening(
        Place(job, position, 0, position),
        start or Start(plan_without_state(7, "")),
        {"w": "w"},
        make_layout([Parameter("w", (4,), "float32")], job.shards(0)),
        spec_of(optimizer, {parameters[0]: 0}),
        "cpu",
        Buffers(dict, everything=True),
        lambda: -1,
    )
    source = SeedSource(LAYOUT, values_of(parameters, optimizer), StepExclusion(0))
    with Stubs(job, None) as stubs:
        rank = FollowedRank(opening, stubs, source, None, repair)
        for line in rank.lines:
            line.start()
        try:
            yield rank
        finally:
            rank.close()


@pytest.mark.parametrize(("reason", "hinted"), [("2 of 4 streams connected", True), ("not seeded", False)])
def test_streams_that_stay_away_are_said_to_need_the_controller(
    monkeypatch: pytest.MonkeyPatch, reason: str, hinted: bool
) -> None:
    monkeypatch.setattr(following, "_lacking", lambda *_: [f"shadow node 0, shard 0: {reason}"])
    place, stubs = Place(local_job(nodes=1, ranks=2), 0, 0, 0), cast(Stubs, None)
    trouble = following.await_ready(place, stubs, 1, time.monotonic())
    assert ("streams need `checkmate run` of this job" in trouble) == hinted


def test_a_refusal_is_told_to_all_nodes_and_cut(nodes: list[RecordingNode], job: Job) -> None:
    with followed(job) as followers:
        followers.report_refusal(12, RefusedError(f"a hook\nchanges p0{5000 * '.'}"), marks=True)
        start = followers._opening.start.plan.start
    for node in nodes:
        (request,) = node.refusals
        assert (request.job, request.protocol, request.start) == (job.job, PROTOCOL, start)
        assert (request.iteration, request.rank) == (12, job.dp_groups[0].ranks[0].named)
        assert request.text.startswith("a hook changes p0...")
        assert len(request.text) == REFUSAL_MAX


def test_a_refusal_waits_for_no_node_for_long_and_never_raises(
    nodes: list[RecordingNode],
    job: Job,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One node is away, the other one hangs."""
    monkeypatch.setattr(following, "REFUSED_SECONDS", 0.5)
    caplog.set_level(logging.INFO, "checkmate")
    with followed(job) as followers:
        wait_until(lambda: all(line.begin_accepted.is_set() for line in followers.lines))
        nodes[0].stop()
        nodes[1].hanging = True
        began = time.monotonic()
        followers.report_refusal(12, RefusedError("no"), marks=True)
        assert time.monotonic() - began < 2
        assert "no shadow node knows why training ends" in caplog.text
        nodes[1].hanging = False
    followers.report_refusal(12, RefusedError("no"), marks=True)  # all is closed
    nodes[0].start()


def test_without_shadow_nodes_a_refusal_is_told_to_nobody(job: Job) -> None:
    with followed(job) as followers:
        followers._place = replace(followers._place, followed=False)
        followers.report_refusal(0, RefusedError("no"), marks=True)


@pytest.mark.parametrize(("position", "count"), [(0, 1), (1, 0)])
def test_a_start_that_is_superseded_says_so_once(
    nodes: list[RecordingNode], job: Job, caplog: pytest.LogCaptureFixture, position: int, count: int
) -> None:
    """Not as trouble with a node, for each node, or on each rank."""
    caplog.set_level(logging.INFO, "checkmate")
    for node in nodes:
        node.reply = lambda part: pb.RecordReply(superseded=part.iteration >= 2, by="10.0.0.9")
    with followed(job, position) as followers:
        for iteration in range(6):
            followers.train(iteration)
        assert len(caplog.messages) == count
        if count:
            assert caplog.messages[0].startswith(
                "another start of this job has begun, on 10.0.0.9, and shadow nodes do not follow this one "
                "any more: what it trains from now on is not kept. If torchrun was started a second time"
            )
        for node in nodes:
            node.stop()  # the other start's node is restarted: this one must not begin there
        begins = [len(node.begins) for node in nodes]
        for node in nodes:
            node.start()
        wait_until(lambda: not any(line._thread.is_alive() for line in followers.lines))
        for line in followers.lines:
            line.send(7, b"nobody takes it")
            assert line.departed(7), "a step does not wait for it"
            assert line.finish(0.1)
        assert [len(node.begins) for node in nodes] == begins
        began = time.monotonic()
        followers.await_stepped(6, began + 20)
        assert time.monotonic() - began < 1
        assert len(caplog.messages) == count


def test_an_older_start_that_goes_on_is_said_once(
    nodes: list[RecordingNode], job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "checkmate")
    hosts = [f"10.0.0.{number}" for number in range(1, 7)]
    for node in nodes:
        node.reply = lambda part: pb.RecordReply(also_training=hosts if part.iteration >= 2 else [])
    with followed(job) as followers:
        for iteration in range(6):
            followers.train(iteration)
    assert caplog.messages == [
        "an older start of this job still trains: its step records come from 10.0.0.1, 10.0.0.2, "
        "10.0.0.3, 10.0.0.4 and 2 more hosts. Shadow nodes follow the newer start only, so what the older "
        "one trains is not kept: end one of the two"
    ]


def test_a_trouble_whose_words_change_at_each_iteration_is_logged_more_and_more_rarely(
    nodes: list[RecordingNode], job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "checkmate")

    def reply(part: pb.RecordPart) -> pb.RecordReply:
        return pb.RecordReply(trouble=f"differs after {part.iteration}" if part.iteration < 12 else "")

    nodes[1].reply = reply
    with followed(job) as followers:
        for iteration in range(14):
            followers.train(iteration)
        nodes[1].reply = lambda part: pb.RecordReply(trouble="differs to the end")
        followers.train(14)
        followers.finish(time.monotonic() + 20)
    assert caplog.messages == [
        "shadow node 1: differs after 0",
        "shadow node 1: differs after 9 (8 more like this since the last such line)",
        "shadow node 1: recovered (2 more like this since the last such line)",
    ]


def test_the_end_of_training_is_no_recovery(
    nodes: list[RecordingNode], job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """The last answer is not to a record."""
    caplog.set_level(logging.INFO, "checkmate")
    nodes[0].reply = lambda part: pb.RecordReply(trouble="differs")
    with followed(job) as followers:
        for iteration in range(ATTENTIVE):
            followers.train(iteration)
        for line in followers.lines:
            line.send(ATTENTIVE, b"")  # of this one no answer is asked for
        before = followers.handled
        followers.finish(time.monotonic() + 20)
        wait_until(lambda: followers.handled > before)
    assert caplog.messages == ["shadow node 0: differs"]


@needs_buffers
def test_two_starts_on_a_real_node(caplog: pytest.LogCaptureFixture) -> None:
    """The first one goes on, is told so, does not begin again, and its records are still taken."""
    job = local_job(nodes=1, ranks=2)
    caplog.set_level(logging.INFO, "checkmate")
    with Serving(job, 0), followed(job) as first:
        first.train(0)
        with Stubs(job, None) as stubs:
            request = pb.FenceRequest(job=job.job, protocol=PROTOCOL, timeout=1)
            stubs.ask([0], lambda stub: stub.Fence, request)
        with followed(job, start=Start(plan_without_state(8, ""))) as second:
            second.train(0)
            for iteration in range(1, 4):
                first.train(iteration)
            wait_until(lambda: "another start of this job has begun, on 127.0.0.1" in caplog.text)
            assert first.lines[0].connected
    messages = [line for line in caplog.messages if "shadow node 0" in line or "another start" in line]
    assert [line.partition(",")[0] for line in messages] == ["another start of this job has begun"]


def test_parameters_that_a_shard_does_not_have_are_not_sent(nodes: list[RecordingNode], job: Job) -> None:
    """A shard or number that no layout has ended the thread that sends seeds."""
    with followed(job, 1) as followers:
        nodes[0].wanted_seeds = [
            pb.SeedWanted(shard=(1 << 20) + 1),
            pb.SeedWanted(shard=1, parameters=[0, 77, 1 << 31]),
        ]
        followers.train(0)
        wait_until(lambda: bool(nodes[0].seeds))
        nodes[0].wanted_seeds = []
        assert {tuple(header.parameters) for header, _ in nodes[0].seeds} == {(0,)}


INCARNATION = 7


@pytest.fixture
def place(job: Job) -> Place:
    return Place(job, 0, 0, 0)


def hold(shard: int, stepped: int, *, live: bool = True) -> pb.HoldStatus:
    return pb.HoldStatus(
        shard=pb.Shard(shard=shard), incarnation=INCARNATION, stepped=stepped, live=live, seeded=True
    )


def waited(place: Place, seconds: float) -> tuple[str, float]:
    """Return what is missing at the end, and how long that took."""
    start = time.monotonic()
    with Stubs(place.job, None) as stubs:
        return following.await_stepped(
            place, stubs, INCARNATION, 5, start + seconds
        ), time.monotonic() - start


def test_the_end_waits_for_live_holds(nodes: list[RecordingNode], place: Place) -> None:
    nodes[0].status = pb.NodeStatus(holds=[hold(0, 5)])
    nodes[1].status = pb.NodeStatus(holds=[hold(1, 4)])

    def step() -> None:
        nodes[1].status = pb.NodeStatus(holds=[hold(1, 5)])

    threading.Timer(0.3, step).start()
    missing, seconds = waited(place, 10)
    assert missing == ""
    assert 0.2 < seconds < 5


def test_the_end_says_what_was_not_stepped_in_time(nodes: list[RecordingNode], place: Place) -> None:
    nodes[0].status = pb.NodeStatus(holds=[hold(0, 5)])
    nodes[1].status = pb.NodeStatus(holds=[hold(1, 3)])
    missing, seconds = waited(place, 0.5)
    assert missing == "shard 1: shadow node 1 is at iteration 3"
    assert 0.4 < seconds < 5


def test_the_end_waits_for_nobody_who_cannot_step(nodes: list[RecordingNode], place: Place) -> None:
    """One has a gap, one has died."""
    nodes[0].status = pb.NodeStatus(holds=[hold(0, 3, live=False)])
    nodes[1].stop()
    missing, seconds = waited(place, 10)
    assert missing.startswith(
        "shard 0: shadow node 0 is at iteration 3; shard 1: shadow node 1: can't be reached"
    )
    assert seconds < 5


def test_a_node_gets_again_only_what_it_holds(
    nodes: list[RecordingNode], job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Shard 0 is node 0's; node 1 asks for it, and for one that there is not."""
    asked: list[tuple[int, int]] = []

    def reply(part: pb.RecordPart) -> pb.RecordReply:
        ranges = [pb.MissingRange(shard=shard, stop=1) for shard in (0, 1, 77)]
        return pb.RecordReply(missing=ranges if part.HasField("repair") else [])

    for node in nodes:
        node.reply = reply
    with followed(job, repair=lambda node, missing, _: asked.append((node, missing.shard))):
        wait_until(lambda: {(0, 0), (1, 1)} <= set(asked))
    assert set(asked) == {(0, 0), (1, 1)}
    assert caplog.text.count("shadow node 0 asks for copies of shard 1") == 1
    assert "which it does not hold" in caplog.text


def test_parameters_count_as_filled_if_the_layout_has_them_there() -> None:
    filled = {0: frozenset((0, 5, (1 << 32) - 1)), 1: frozenset((0,)), (1 << 32) - 1: frozenset((0,))}
    assert filled_shards(filled, LAYOUT) == [[0, 0]]
