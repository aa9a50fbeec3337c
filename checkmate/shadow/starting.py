"""`Begin`: a DP group starts, or this node has come back to it (design, section 7, *Start* and *Loss*)."""

from __future__ import annotations

import logging

from checkmate.layout import Layout
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.group import Group, Refused, check_begin, reusable, start_of, warnings
from checkmate.shadow.hold import AHEAD, Hold
from checkmate.shadow.node import Node
from checkmate.shadow.records import Records
from checkmate.shadow.replica import Replica
from checkmate.shadow.streams import StreamTooLong

log = logging.getLogger("checkmate")


def begin(node: Node, request: pb.BeginRequest) -> list[str]:
    """Make the group's holds and connect their streams; warnings. `Refused` where the request doesn't fit.

    Said again, of a start that has begun, it changes nothing.
    """
    layout = check_begin(node.job, request)
    with node.changed:
        start = start_of(request)
        if start in node.fenced_starts:
            raise Refused(
                f"incarnation {request.incarnation} is fenced: training starts in a new one",
                precondition=True,
            )
        old = node.groups.get(request.group)
        if old is not None and _same(old, request, layout):
            return warnings(request)
        group = _new_group(node, request, layout, old)
        for hold in old.holds if old is not None else ():
            hold.close()
        node.groups[request.group] = group
        if node.fenced or node.start != start:
            node.start = start
            node.committee = node.new_committee(request.incarnation, request.start)
            node.fenced = node.answered = False
        for hold in group.holds:
            node.connect(group, hold)
        node.refresh()
    log.info(
        "DP group %d: incarnation %d begins at iteration %d",
        request.group,
        request.incarnation,
        request.next_iteration,
    )
    return warnings(request)


def _same(old: Group, request: pb.BeginRequest, layout: Layout) -> bool:
    return start_of(old.begin) == start_of(request) and old.layout.fingerprint == layout.fingerprint


def _new_group(node: Node, request: pb.BeginRequest, layout: Layout, old: Group | None) -> Group:
    records = Records(request.ranks, request.first_iteration, request.buffers)
    group = Group(request, layout, records)
    kept = {hold.plan.shard: hold for hold in reusable(old, request, layout)}
    if kept and old is not None:
        records.adopt(old.records.served(request.first_iteration - 1))
    late = request.next_iteration > request.first_iteration
    for plan in node.plans:
        if plan.group != request.group:
            continue
        before = kept.get(plan.shard)
        try:
            hold = Hold(
                plan,
                layout,
                before.replica if before is not None else _replica(layout, plan.shard, request),
                channels=node.job.channels,
                ranks=request.ranks,
                first=request.first_iteration,
                joined=request.next_iteration + AHEAD if late else request.first_iteration,
            )
        except StreamTooLong as error:
            raise Refused(f"DP group {plan.group}, shard {plan.shard}: {error}") from None
        if before is not None:
            hold.doubt.past = before.doubt.past
        group.holds.append(hold)
    return group


def _replica(layout: Layout, shard: int, request: pb.BeginRequest) -> Replica:
    try:
        return Replica(layout, shard, request.optimizer, exact=not request.device.startswith("cuda"))
    except ValueError as error:
        raise Refused(f"the optimizer can't be followed: {error}") from None
