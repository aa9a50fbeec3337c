"""Seeds: what trainers send, what is asked of them, and what another holder gives (design, *Loss*)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from checkmate import state
from checkmate.layout import Layout
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow.group import Group
from checkmate.shadow.hold_state import HoldState
from checkmate.shadow.node import Node

log = logging.getLogger("checkmate")

ASKED_SECONDS = 5.0
"""Trainers that have been asked are asked again after so long."""
PIECE_BYTES = 16 << 20
"""Of parameters, fetched from another holder at a time."""

_CALL_SECONDS = 5.0
_FETCH_SECONDS = 60.0
_IDLE_SECONDS = 0.1


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


def _reply(group: Group, part: pb.RecordPart, now: float) -> pb.RecordReply:
    wanted = [
        pb.SeedWanted(shard=hold.plan.shard, parameters=numbers)
        for hold in group.holds
        if hold.plan.shard % group.begin.ranks == part.position and (numbers := _to_ask(hold, now))
    ]
    trouble = [_to_tell(hold) for hold in group.holds] if part.position == 0 else []
    said = "; ".join(filter(None, trouble))
    buffers = part.position == 0 and group.records.take_wants_buffers()
    return pb.RecordReply(iteration=part.iteration, wanted=wanted, trouble=said, buffers=buffers)


def _to_ask(hold: HoldState, now: float) -> list[int]:
    """What a hold needs of trainers: once it has got an iteration whole, and no other holder gives it."""
    if not hold.wants_seeds or hold.from_holder or now - hold.asked < ASKED_SECONDS:
        return []
    hold.asked = now
    return hold.wanted()


def _to_tell(hold: HoldState) -> str:
    """What the group's first rank is to say to its user."""
    return f"{hold}: {hold.trouble}" if hold.doubtful else ""


class Copier:
    """A thread that seeds our holds from their other holders, a piece at a time."""

    def __init__(self, node: Node, channel_to: Callable[[int], grpc.Channel]) -> None:
        self._node = node
        others = {other for plan in node.plans for other in plan.others}
        self._channels = {other: channel_to(other) for other in others}
        self._thread = threading.Thread(target=self._run, name="seeds", daemon=True)

    def start(self) -> None:
        """Look after holds from now on."""
        if self._channels:
            self._thread.start()

    def stop(self) -> None:
        """End."""
        for channel in self._channels.values():
            channel.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._node.stopping:
            with self._node.changed:
                holds = [one for one in self._node.state.holds if one[1].plan.others and one[1].wants_seeds]
            helped = [self._help(group, hold) for group, hold in holds]
            if not any(helped):
                time.sleep(_IDLE_SECONDS)

    def _help(self, group: Group, hold: HoldState) -> bool:
        """Fetch one piece for a hold that needs one; whether any of its other holders could give it."""
        for other in hold.plan.others:
            try:
                given = self._piece(other, group, hold)
            except (grpc.RpcError, state.StateError, ValueError) as error:
                log.debug("shadow node %d gives no seeds of %s: %s", other, hold, error)
                given = False
            with self._node.changed:
                hold.from_holder = given
            if given:
                return True
        return False

    def _piece(self, other: int, group: Group, hold: HoldState) -> bool:
        """Some of what a hold wants, from one of its other holders; whether that could give it."""
        stub = ShadowStub(self._channels[other])
        job, shard = self._node.job.job, pb.Shard(group=hold.plan.group, shard=hold.plan.shard)
        iteration = _reserve(stub, job)
        if iteration is None:
            return False
        try:
            with self._node.changed:
                wanted = some(hold.wanted(), group.layout, PIECE_BYTES)
            if not wanted:
                return False  # trainers were faster; to name none would mean all
            request = pb.FetchRequest(job=job, shard=shard, iteration=iteration, parameters=wanted)
            seeds = state.from_seeds(stub.Fetch(request, timeout=_FETCH_SECONDS))
            begin, header = group.begin, seeds.header
            if (header.incarnation, header.run, header.start) != (begin.incarnation, begin.run, begin.start):
                return False
            parameters = seeds.all()
        finally:
            stub.Release(pb.ReleaseRequest(job=job, iteration=iteration), timeout=_CALL_SECONDS)
        self._node.load(hold, header.iteration, parameters)
        with self._node.moving():
            group.records.adopt(header.record)
        return True


def _reserve(stub: ShadowStub, job: str) -> int | None:
    """An iteration that a node will keep for us; `None` where it has nothing to give."""
    iteration = 0
    for ahead in (1, 2, 4, 8):
        request = pb.ReserveRequest(job=job, iteration=iteration, seconds=_FETCH_SECONDS)
        reply = stub.Reserve(request, timeout=_CALL_SECONDS)
        if reply.granted:
            return iteration
        if reply.stepped < 0:
            return None
        iteration = reply.stepped + ahead
    return None


def some(wanted: Sequence[int], layout: Layout, most: int) -> list[int]:
    """The first of them, so many as have `most` bytes; one at least."""
    found: list[int] = []
    nbytes = 0
    for number in wanted:
        found.append(number)
        nbytes += layout.parameters[number].nbytes
        if nbytes >= most:
            break
    return found
