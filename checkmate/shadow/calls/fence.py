"""`Fence`, `Copy`, `Parts` and `Settle`: the RPCs of a restart (design, section 7, *Restart*). `Reset`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc

from checkmate.base.wording import at_iteration
from checkmate.events.kinds import NODE_FENCED
from checkmate.events.process_log import say
from checkmate.nodes.stubs import reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow.calls.begin import locked_status, node_status
from checkmate.shadow.calls.transfer import record
from checkmate.shadow.logic.bounds import (
    MAX_FENCE_SECONDS,
    check_copy,
    check_fence,
    check_parts,
    check_protocol,
    check_settle,
)
from checkmate.shadow.logic.effects import DueStep
from checkmate.shadow.logic.group import CallRefused, ShadowGroup, check_job, in_start, source_of
from checkmate.shadow.logic.hold import Hold
from checkmate.shadow.logic.phases import Phase
from checkmate.shadow.node import Node

_COPY_SECONDS = 10.0

QUIET, QUIET_AGAIN = 0.2, 0.05
"""Seconds without new data after which a node stops reading; the latter if it has waited before.

The latter is also the least that a node waits the first time, whatever was before."""
QUIET_UNDECIDED = 2.0
"""The same while iterations wait for reports of other nodes; only the time after the call counts."""


StillWaits = Callable[[], bool]
"""Whether the caller still waits for the answer."""


def stop(
    node: Node, request: pb.FenceRequest, remaining: float, is_waiting: StillWaits, caller: str = ""
) -> pb.NodeStatus:
    """Drain or fence for at most the `remaining` seconds of the call. Raise `CallRefused` like both."""
    check_fence(request)
    timeout = min(request.timeout or remaining, remaining, MAX_FENCE_SECONDS)
    if request.drain:
        return drain(node, request.job, timeout, is_waiting)
    return fence(node, request.job, timeout, is_waiting, caller)


def drain(node: Node, job: str, timeout: float, is_waiting: StillWaits = lambda: True) -> pb.NodeStatus:
    """Continue to commit until all recorded iterations are stepped or nothing changes; return the status.

    Starts of training that have begun here cannot begin again. Takes at most `timeout` seconds. Raises
    `CallRefused` if the caller no longer waits when its turn comes.
    """
    check_job(node.job, job)
    with node.moving() as state:
        _check_waits(is_waiting)
        again = state.phase >= Phase.DRAINED
        state.drain()
    _read_on(node, node.now() + timeout, again=again)
    _read_file(node)
    with node.state_changed:
        state.end_drain()
        return _answer(node)


def fence(
    node: Node, job: str, timeout: float, is_waiting: StillWaits = lambda: True, caller: str = ""
) -> pb.NodeStatus:
    """Stop commits in this incarnation for good, read until no more data arrives, and return the status.

    Trainers of this incarnation that go on are told so, with the caller's address.

    Raises `CallRefused`, and does not affect another incarnation, if the caller no longer waits when
    its turn comes, or if training has restarted in the meantime.
    """
    check_job(node.job, job)
    deadline = node.now() + timeout
    with node.moving() as state:
        _check_waits(is_waiting)
        committee, again = state.committee, state.phase >= Phase.DRAINED
        state.fence()
        state.supersede(caller, node.now())
        node.quiet(timeout)
    _read_on(node, deadline, again=again)
    _read_file(node)
    node.touch()
    with node.state_changed:
        if state.committee is not committee:
            number = state.committee.incarnation
            raise CallRefused(
                f"incarnation {number} has begun in the meantime, and is not fenced", precondition=True
            )
        state.end_fence()
        if state.groups:
            stands = "; ".join(_state_words(hold) for _, hold in state.holds)
            stepped = max((hold.stepped for _, hold in state.holds), default=-1)
            number = state.committee.incarnation
            event = NODE_FENCED(incarnation=number, iteration=stepped, why=stands)
            say(logging.INFO, event, "fenced for a restart; %s", stands or "no shards held")
        return _answer(node)


def copy(node: Node, request: pb.CopyRequest) -> pb.CopyReply:
    """Copy parts of step records from other nodes. Ignore parts that this node has already."""
    check_job(node.job, request.job)
    check_copy(node.job, node.id, request)
    reply = pb.CopyReply()
    for source in request.wanted:
        try:
            with open_channel(node.job, source.node, node.access.keys) as channel:
                parts_request = pb.PartsRequest(job=request.job, parts=source.parts)
                for part in ShadowStub(channel).Parts(parts_request, timeout=_COPY_SECONDS):
                    record(node, part, answer=False)
                    reply.copied += 1
        except (grpc.RpcError, CallRefused) as error:  # also a part that does not fit
            reply.troubles.append(f"records from shadow node {source.node}: {reason(error)}")
    return reply


def parts(node: Node, request: pb.PartsRequest) -> list[pb.RecordPart]:
    """Return parts of step records. Raise `CallRefused` if another start of training has begun here."""
    check_job(node.job, request.job)
    check_parts(node.job, request.parts)
    message = request.parts
    with node.state_changed:
        group = in_start(node.state.groups.get(message.group), message.group, message)
        return group.records.parts_of(message.ranges)


def _check_waits(is_waiting: StillWaits) -> None:
    if not is_waiting():
        raise CallRefused("the caller is gone; nothing was done", precondition=True)


def _read_on(node: Node, deadline: float, *, again: bool) -> None:
    """Wait until nothing has arrived and nothing was stepped for `QUIET` seconds.

    Time before the call counts: ranks died some seconds before they restart. Wait less if all data is
    complete, and longer if complete iterations wait for reports of other nodes. Data that this machine has
    received but not read counts as arriving, because the process may have been stopped.

    Args:
        node: The node.
        deadline: When to stop waiting, in the node's time.
        again: Whether this start of training was waited for before.
    """
    call_time = node.now()
    while (now := node.now()) < deadline:
        unread = node.unread() > 0
        with node.state_changed:
            state, since = node.state, node.silent_since(unread=unread)
            enough = QUIET_AGAIN if again or state.drained else QUIET
            least = 0.0 if again else QUIET_AGAIN
            if state.undecided and not state.fenced:
                enough = least = QUIET_UNDECIDED
        if now >= since + enough and now >= call_time + least:
            return
        time.sleep(QUIET_AGAIN / 5)


def _read_file(node: Node) -> None:
    """Read the node's job file again, for `_answer`, which holds the lock."""
    if node.file is not None:
        node.file.read_again()


def _answer(node: Node) -> pb.NodeStatus:
    """Return the status for a restart. The caller holds the lock."""
    answer = locked_status(node)
    if node.file is not None:
        ranks, answer.next_trouble = node.file.next_ranks(node.job)
        if ranks is not None:
            answer.next_ranks.CopyFrom(ranks)
    answer.drained = node.state.drained
    for group in node.state.groups.values():
        begin = group.begin
        answer.parts.add(
            group=begin.group,
            incarnation=begin.incarnation,
            run=begin.run,
            start=begin.start,
            ranges=group.records.part_ranges(),
        )
    return answer


def _state_words(hold: Hold) -> str:
    return f"{hold} is {at_iteration(hold.stepped)}" if hold.seeded else f"{hold} is not seeded"


def settle(node: Node, request: pb.SettleRequest, is_waiting: StillWaits = lambda: True) -> pb.NodeStatus:
    """Step to the target iteration, then discard streams and gradients. Drop holds that cannot step to it."""
    check_job(node.job, request.job)
    check_settle(request)
    with node.state_changed:
        _check_waits(is_waiting)
        if not node.state.fenced and node.state.groups:
            raise CallRefused("the node is not fenced: call Fence first", precondition=True)
        groups = node.state.groups_of(request.ranks_digest)
        holds = [*node.state.holds, *node.state.former_holds]
    for group, hold in holds:
        is_asked_for = groups.get(hold.plan.group) is group
        _settle(node, group, hold, request, "" if is_asked_for else "it was of other ranks")
    with node.state_changed:
        node.state.forget()
    return node_status(node, request.job)


def reset(node: Node, request: pb.ResetRequest) -> pb.NodeStatus:
    """Discard all runs up to a generation. Raise `CallRefused` if a newer one has begun here."""
    check_protocol(request.protocol)
    check_job(node.job, request.job)
    with node.moving() as state:
        state.reset(request.generation)
    return node_status(node, request.job)


def _settle(node: Node, group: ShadowGroup, hold: Hold, request: pb.SettleRequest, why: str) -> None:
    """Settle a hold, or drop it, if it can't be, or there is a reason `why` not."""
    iteration, why = request.iteration, why or _other_state(group, request)
    with node.state_changed:
        node.wait_for(lambda: not hold.busy, QUIET)
        fits = hold.seeded and not hold.doubtful and not why
    while fits and hold.stepped == (before := hold.released) < min(iteration, hold.in_full):
        node.step(DueStep(group, hold, before + 1))
        if hold.released == before:
            break  # it failed, or training has restarted in the meantime
    with node.moving() as state:
        resources = node.resources.get(hold)
        if resources is None:
            return  # training has restarted in the meantime
        if not (fits and hold.stepped == iteration and not hold.doubtful):
            words = f"dropped when a restart asked for iteration {iteration}"
            state.drop(group, hold, f"{hold}: {words}: {why or _trouble_words(hold)}")
            return
        hold.settle()
    resources.settle()


def _other_state(group: ShadowGroup, request: pb.SettleRequest) -> str:
    """Return why the state of a group is not what a restart resumes from, or ""."""
    if group.begin.run != request.run:
        return f"it was of run {group.begin.run}, not of {request.run}"
    if source_of(group.begin, request.iteration) != request.continues:
        return "it was of another start of training of this run"
    return ""


def _trouble_words(hold: Hold) -> str:
    """Return how far a hold is that a restart cannot use."""
    stood = f"it was {at_iteration(hold.stepped)}" if hold.seeded else "it was not seeded"
    return hold.trouble or stood
