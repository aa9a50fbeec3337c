"""`checkmate drain`: takes a shadow node out of its job once other nodes hold its shards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from checkmate.job.schema import Job
from checkmate.nodes.standing import (
    Answers,
    Shard,
    beginning_of,
    counted_holds,
    name,
    newest_beginnings,
    node_name,
)
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL

Step = pb.LeaveRequest.Step

_AGAIN_SECONDS: Final = 0.5
BEHIND: Final = 1
"""Iterations by which another holder may be behind, because statuses are not of the same moment."""


class NotDrained(RuntimeError):
    """The node goes on. The message has the reason, and what would help."""

    exit_code = 1


class NodeAway(NotDrained):
    """The node does not answer."""

    exit_code = 3


def only_here(answers: Answers, node: int) -> list[Shard]:
    """Return the shards of which a node has state of the newest start of training, and no other live one has.

    A live holder does not count if it is not offered, because it is doubtful or lacks buffers, or if one of
    its streams is not connected, which may turn out to be a gap, or if it is behind.
    """
    holds = counted_holds(answers)
    newest = newest_beginnings(hold for _, hold in holds)
    present = [(holder, hold) for holder, hold in holds if beginning_of(hold) in newest]
    shards = {(holder, (hold.shard.group, hold.shard.shard)): hold for holder, hold in present}
    seeded_holds = {shard: hold for (holder, shard), hold in shards.items() if holder == node and hold.seeded}
    elsewhere = {
        shard
        for (holder, shard), hold in shards.items()
        if holder != node and shard in seeded_holds and _as_good(hold, seeded_holds[shard])
    }
    return sorted(seeded_holds.keys() - elsewhere)


def _as_good(hold: pb.HoldStatus, than: pb.HoldStatus) -> bool:
    return hold.offered and hold.connected == hold.streams and hold.in_full >= than.stepped - BEHIND


def held_shards(answer: pb.NodeStatus) -> list[Shard]:
    """Return the shards of which a node has state."""
    return sorted((hold.shard.group, hold.shard.shard) for hold in answer.holds if hold.seeded)


def drain(
    job: Job,
    stubs: Stubs,
    node: int,
    seconds: float,
    *,
    force: bool = False,
    waits: Callable[[str], None] = lambda why: None,
) -> list[Shard]:
    """Have a node leave its job until it is restarted. Return the shards of which it had state.

    Args:
        job: The job.
        stubs: Stubs of its nodes, with keys of role trainer.
        node: The node's id.
        seconds: How long to wait for other live holders of its shards.
        force: Whether it leaves even if it has the only state of a shard.
        waits: Called with the reason while it waits.

    Raises:
        NotDrained: It has the only state of a shard, or training restarts. It goes on as before.
        NodeAway: It does not answer.
    """
    if force:
        before = _own_answer(job, node, stubs.statuses())
        _go(job, stubs, node, force=True)
        return held_shards(before)
    deadline = time.monotonic() + seconds
    while True:
        answers = stubs.statuses()
        before = _own_answer(job, node, answers)
        if before.left:
            return []
        if not (alone := only_here(answers, node)):
            break
        why = _without(job, node, alone)
        if time.monotonic() > deadline:
            raise NotDrained(why)
        waits(why)
        time.sleep(_AGAIN_SECONDS)
    token = os.urandom(16)  # no other command's answer makes this one valid
    answer = _leave(job, stubs, node, Step.ASK, token=token)
    # Others may have been asked at the same time: who sees that the other one counts no longer, stays.
    if alone := only_here({**stubs.statuses(), node: answer}, node):
        _leave(job, stubs, node, Step.STAY, token=token)
        raise NotDrained(_without(job, node, alone))
    _go(job, stubs, node, token=token)
    return held_shards(before)


def _own_answer(job: Job, node: int, answers: Answers) -> pb.NodeStatus:
    answer = answers[node]
    if isinstance(answer, str):
        raise NodeAway(f"{node_name(job, node)}: {answer}")
    return answer


def _go(job: Job, stubs: Stubs, node: int, *, token: bytes = b"", force: bool = False) -> None:
    """Tell the node to go. If its answer is missing, its status tells whether it has gone."""
    try:
        _leave(job, stubs, node, Step.GO, token=token, force=force)
    except NotDrained:
        answer = stubs.statuses()[node]
        if isinstance(answer, str) or not answer.left:
            raise


def _leave(
    job: Job,
    stubs: Stubs,
    node: int,
    step: pb.LeaveRequest.Step.ValueType,
    *,
    token: bytes = b"",
    force: bool = False,
) -> pb.NodeStatus:
    request = pb.LeaveRequest(job=job.job, protocol=PROTOCOL, step=step, token=token, force=force)
    answer = stubs.ask([node], lambda stub: stub.Leave, request)[node]
    if isinstance(answer, str):
        raise NotDrained(f"{node_name(job, node)}: {answer}")
    return answer


def _without(job: Job, node: int, alone: list[Shard]) -> str:
    shards = ", ".join(name(shard) for shard in alone)
    more = "replicas: 2 prevents this" if job.replicas == 1 else "wait until another holder is live"
    return f"{node_name(job, node)} has the only live state of {shards}; {more}"
