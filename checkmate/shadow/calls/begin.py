"""`Begin`: a DP group starts, or this node rejoins it (design, section 7, *Start* and *Loss*)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import memory
from checkmate.shadow.hold import Hold
from checkmate.shadow.logic.group import CallRefused, ShadowGroup, reusable, start_of, warnings
from checkmate.shadow.logic.hold_state import AHEAD, HoldState
from checkmate.shadow.logic.record_bounds import check_begin
from checkmate.shadow.logic.records import Records
from checkmate.shadow.node import Node
from checkmate.shadow.receive.plans import HoldPlan, StreamTooLong
from checkmate.shadow.replica.replica import Replica
from checkmate.wire.layout import Layout

log = logging.getLogger("checkmate")


def begin(node: Node, request: pb.BeginRequest) -> list[str]:
    """Create the group's holds and connect their streams. Return warnings.

    If this start of training has begun already, it only notes how far trainers are. Raises `CallRefused` if
    the request is wrong.
    """
    shards = [plan.shard for plan in node.plans if plan.group == request.group]
    layout = check_begin(node.job, request, shards, memory.physical())
    with node.moving() as state:
        start = start_of(request)
        if start in state.fenced_starts:
            raise CallRefused(
                f"incarnation {request.incarnation} is fenced: start training in a new one",
                precondition=True,
            )
        old = state.groups.get(request.group)
        if old and start_of(old.begin) == start and old.layout.fingerprint == layout.fingerprint:
            old.reached = max(old.reached, request.next_iteration)
            return warnings(request)
        kept = {hold.plan.shard: hold for hold in reusable(old, request, layout)}
        records = Records(request.ranks, request.first_iteration, request.buffers)
        if old is not None and kept:
            records.adopt(old.records.served(request.first_iteration - 1))
        holds = _new_holds(node, request, layout, kept)
        node.data.update({hold.state: hold for hold in holds})
        group = ShadowGroup(request, layout, records, [hold.state for hold in holds])
        state.begun(group, node.now())
    log.info(
        "DP group %d: incarnation %d begins at iteration %d",
        request.group,
        request.incarnation,
        request.next_iteration,
    )
    return warnings(request)


def _new_holds(
    node: Node, request: pb.BeginRequest, layout: Layout, kept: Mapping[int, HoldState]
) -> list[Hold]:
    """Return the group's holds on this node. Holds that a restart has `kept`, by shard, keep their state."""
    first, late = request.first_iteration, request.next_iteration > request.first_iteration
    joined = request.next_iteration + AHEAD if late else first
    ranks, channels = request.ranks, node.job.channels
    holds = []
    for plan in node.plans:
        if plan.group != request.group:
            continue
        before = kept.get(plan.shard)
        replica = node.data[before].replica if before is not None else _replica(layout, plan, request)
        try:
            hold = Hold(plan, layout, replica, channels=channels, ranks=ranks, first=first, joined=joined)
        except StreamTooLong as error:
            raise CallRefused(f"DP group {plan.group}, shard {plan.shard}: {error}") from None
        if before is not None:
            hold.state.doubt.past = before.doubt.past
        holds.append(hold)
    return holds


def _replica(layout: Layout, plan: HoldPlan, request: pb.BeginRequest) -> Replica:
    try:
        return Replica(layout, plan.shard, request.optimizer, exact=not request.device.startswith("cuda"))
    except (RuntimeError, TypeError, ValueError) as error:  # torch checks options in its own ways
        raise CallRefused(f"unsupported optimizer: {error}") from None
