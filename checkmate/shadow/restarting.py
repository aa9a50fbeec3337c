"""`Fence` and `Settle`: what a restart asks of a node (design, section 7, *Restart*)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.group import Group, Refused, check_job
from checkmate.shadow.hold_state import HoldState
from checkmate.shadow.node import Node
from checkmate.shadow.node_state import Due
from checkmate.shadow.status import node_status

log = logging.getLogger("checkmate")

QUIET = 0.2
"""A fenced node reads on until nothing has come for so many seconds."""


def fence(node: Node, job: str, timeout: float, wanted: Callable[[], bool] = lambda: True) -> pb.NodeStatus:
    """Stop committing in this incarnation for good, read on until it is quiet, and say what there is.

    `Refused`, and another incarnation is left alone, where the answer isn't `wanted` any more when its turn
    comes, or training has begun anew meanwhile.
    """
    check_job(node.job, job)
    deadline = time.monotonic() + timeout
    with node.moving() as state:
        if not wanted():
            raise Refused("who called has gone: nothing is fenced", precondition=True)
        committee = state.committee
        state.fence()
        node.quiet(timeout)
    since, seen = time.monotonic(), _seen(node)
    while time.monotonic() < min(deadline, since + QUIET):
        time.sleep(QUIET / 10)
        if (now_seen := _seen(node)) != seen:
            since, seen = time.monotonic(), now_seen
    node.touch()
    with node.changed:
        if state.committee is not committee:
            number = state.committee.incarnation
            raise Refused(f"incarnation {number} has begun meanwhile, and is not fenced", precondition=True)
        state.answered = True
        if state.groups:
            stands = "; ".join(_stands(hold) for _, hold in state.holds)
            log.info("fenced: training starts again; %s", stands or "no shard is held")
    return node_status(node, job)


def _stands(hold: HoldState) -> str:
    return f"{hold} is at iteration {hold.stepped}" if hold.seeded else f"{hold} is not seeded"


def _seen(node: Node) -> tuple[int, ...]:
    """Moves with every byte and every record that comes."""
    groups = list(node.state.groups.values())
    return (*(reader.bytes for reader in node.readers), *(group.records.count for group in groups))


def settle(node: Node, job: str, iteration: int, run: str) -> pb.NodeStatus:
    """Step up to the target, then drop streams and gradients. A hold that can't, or of another run, goes."""
    check_job(node.job, job)
    with node.changed:
        if not node.state.fenced and node.state.groups:
            raise Refused("the node is not fenced: call Fence first", precondition=True)
        holds = list(node.state.holds)
    for group, hold in holds:
        _settle(node, group, hold, iteration, run)
    with node.changed:
        node.state.forget()
    return node_status(node, job)


def _settle(node: Node, group: Group, hold: HoldState, iteration: int, run: str) -> None:
    with node.changed:
        node.wait_for(lambda: not hold.busy, QUIET)
        fits = hold.seeded and not hold.doubtful and group.begin.run == run
    while fits and hold.stepped == hold.released < min(iteration, hold.in_full):
        node.step(Due(group, hold, hold.released + 1))
    with node.moving() as state:
        data = node.data.get(hold)
        if data is None:
            return  # training has begun anew meanwhile
        if not (fits and hold.stepped == iteration and not hold.doubtful):
            asked = f"given up when a restart asked for iteration {iteration}"
            state.drop(group, hold, f"{hold}: {asked}: {_why(group, hold, run)}")
            return
        hold.settle()
    data.settle()


def _why(group: Group, hold: HoldState, run: str) -> str:
    """Why a hold is of no use to a restart."""
    if group.begin.run != run:
        return f"it was of run {group.begin.run}, not of {run}"
    stood = f"it had stepped iteration {hold.stepped}" if hold.seeded else "it was not seeded"
    return hold.trouble or stood
