"""Seeds and step records: what trainers send, and what is asked of them (design, section 7, *Loss*)."""

from __future__ import annotations

import logging

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.group import ShadowGroup
from checkmate.shadow.logic.hold_state import HoldState
from checkmate.shadow.node import Node

log = logging.getLogger("checkmate")

ASKED_SECONDS = 5.0
"""Trainers that have been asked are asked again after so long."""


def seed(node: Node, seeds: state.SeedReader) -> list[int]:
    """Take parameters; those whose next gradients are gone must come again. `StateError`, `Refused`."""
    header = seeds.header
    with node.changed:
        group = node.state.group(header.shard.group, header)
        hold = group.hold(header.shard.shard)
    late = node.load(hold, header.iteration, seeds.all())
    with node.moving():
        group.records.adopt(header.record)
    return late


def record(node: Node, part: pb.RecordPart, answer: bool) -> pb.RecordReply | None:
    """Take a rank's part of a step record; the answer, if one is wanted, says what that rank is to seed."""
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
    """What a hold needs of trainers: once it has got an iteration whole, and no other holder gives it."""
    if not hold.wants_seeds or hold.from_holder or now - hold.asked < ASKED_SECONDS:
        return []
    hold.asked = now
    return hold.wanted()


def _to_tell(hold: HoldState) -> str:
    """What the group's first rank is to say to its user."""
    return f"{hold}: {hold.trouble}" if hold.doubtful else ""
