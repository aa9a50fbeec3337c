"""Waiting for shadow nodes at the end: until they have stepped the last iteration, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.start.followers import await_stepped
from checkmate.training.start.membership import Membership
from testbed.copies import local_job
from tests.support.shadow.recording_node import RecordingNode

INCARNATION = 7


@pytest.fixture
def nodes() -> Iterator[list[RecordingNode]]:
    served = [RecordingNode(), RecordingNode()]
    yield served
    for node in served:
        node.stop()


@pytest.fixture
def place(nodes: list[RecordingNode]) -> Membership:
    data = data_of(local_job(nodes=2, ranks=2), exclude_none=True)
    for described, node in zip(data["shadow_nodes"], nodes, strict=True):
        described["mgmt"], described["records"] = node.address, node.records_at
    return Membership(of_data(Job, data), 0, 0, 0)


def hold(shard: int, stepped: int, *, live: bool = True) -> pb.HoldStatus:
    return pb.HoldStatus(
        shard=pb.Shard(shard=shard), incarnation=INCARNATION, stepped=stepped, live=live, seeded=True
    )


def waited(place: Membership, seconds: float) -> tuple[str, float]:
    """Return what is missing at the end, and how long that took."""
    start = time.monotonic()
    with Stubs(place.job, None) as stubs:
        return await_stepped(place, stubs, INCARNATION, 5, start + seconds), time.monotonic() - start


def test_the_end_waits_for_live_holds(nodes: list[RecordingNode], place: Membership) -> None:
    nodes[0].status = pb.NodeStatus(holds=[hold(0, 5)])
    nodes[1].status = pb.NodeStatus(holds=[hold(1, 4)])

    def step() -> None:
        nodes[1].status = pb.NodeStatus(holds=[hold(1, 5)])

    threading.Timer(0.3, step).start()
    missing, seconds = waited(place, 10)
    assert missing == ""
    assert 0.2 < seconds < 5


def test_the_end_says_what_was_not_stepped_in_time(nodes: list[RecordingNode], place: Membership) -> None:
    nodes[0].status = pb.NodeStatus(holds=[hold(0, 5)])
    nodes[1].status = pb.NodeStatus(holds=[hold(1, 3)])
    missing, seconds = waited(place, 0.5)
    assert missing == "shard 1: shadow node 1 is at iteration 3"
    assert 0.4 < seconds < 5


def test_the_end_waits_for_nobody_who_cannot_step(nodes: list[RecordingNode], place: Membership) -> None:
    """One has a gap, one has died."""
    nodes[0].status = pb.NodeStatus(holds=[hold(0, 3, live=False)])
    nodes[1].stop()
    missing, seconds = waited(place, 10)
    assert missing.startswith(
        "shard 0: shadow node 0 is at iteration 3; shard 1: shadow node 1: can't be reached"
    )
    assert seconds < 5
