"""Seeds and step records from trainers, and requests for seeds (design, section 7, *Loss*)."""

from __future__ import annotations

import logging

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.group import ShadowGroup
from checkmate.shadow.logic.hold_state import HoldState
from checkmate.shadow.node import Node

log = logging.getLogger("checkmate")

ASKED_SECONDS = 5.0
"""Interval between requests for seeds."""


def seed(node: Node, seeds: state.SeedReader) -> list[int]:
    """Load seeds. Return late parameters, which must be sent again. Raise `StateError` or `CallRefused`."""
    header = seeds.header
    with node.changed:
        group = node.state.group(header.shard.group, header)
        hold = group.hold(header.shard.shard)
    late = node.load(hold, header.iteration, seeds.all())
    with node.moving():
        group.records.adopt(header.record)
    return late


def record(node: Node, part: pb.RecordPart, answer: bool) -> pb.RecordReply | None:
    """Add a rank's part of a step record. Return the reply, with requests for seeds, if one is wanted."""
    with node.moving() as state:
        group = state.group(part.group, part)
        group.records.add(part, node.now())
    if not answer:
        return None
    with node.changed:
        return _reply(group, part, node.now())


def _reply(group: ShadowGroup, part: pb.RecordPart, now: float) -> pb.RecordReply:
    wanted = [
        pb.SeedWanted(shard=hold.plan.shard, parameters=numbers)
        for hold in group.holds
        if hold.plan.shard % group.begin.ranks == part.position and (numbers := _to_ask(hold, now))
    ]
    trouble = [_to_tell(hold) for hold in group.holds] if part.position == 0 else []
    said = "; ".join(filter(None, trouble))
    buffers = part.position == 0 and group.records.take_wants_buffers()
    suspects = [one for hold in group.holds for one in hold.suspects] if part.position == 0 else []
    return pb.RecordReply(
        iteration=part.iteration, wanted=wanted, trouble=said, buffers=buffers, suspects=suspects
    )


def _to_ask(hold: HoldState, now: float) -> list[int]:
    """Return the parameters to request from trainers, unless another holder provides them."""
    if not hold.wants_seeds or hold.from_holder or now - hold.asked < ASKED_SECONDS:
        return []
    hold.asked = now
    return hold.wanted()


def _to_tell(hold: HoldState) -> str:
    """Return what the group's first rank reports to its user."""
    return f"{hold}: {hold.trouble}" if hold.doubtful else ""
