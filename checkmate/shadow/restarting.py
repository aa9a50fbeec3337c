"""`Fence` and `Settle`: what a restart asks of a node (design, section 7, *Restart*)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.group import Group, Refused, check_job, start_of
from checkmate.shadow.hold import Hold
from checkmate.shadow.node import Node
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
    with node.changed:
        if not wanted():
            raise Refused("who called has gone: nothing is fenced", precondition=True)
        committee = node.committee
        node.fenced, node.answered = True, False
        for group in node.groups.values():
            start = start_of(group.begin)
            if start not in node.fenced_starts:
                node.fenced_starts.append(start)
        node.quiet(timeout)
        node.refresh()
    since, seen = time.monotonic(), _seen(node)
    while time.monotonic() < min(deadline, since + QUIET):
        time.sleep(QUIET / 10)
        if (now_seen := _seen(node)) != seen:
            since, seen = time.monotonic(), now_seen
    with node.changed:
        if node.committee is not committee:
            number = node.committee.incarnation
            raise Refused(f"incarnation {number} has begun meanwhile, and is not fenced", precondition=True)
        node.refresh()
        node.answered = True
        if node.groups:
            log.info(
                "fenced: training starts again; %s", "; ".join(map(_stands, node.holds)) or "no shard is held"
            )
        return node_status(node, job)


def _stands(place: tuple[Group, Hold]) -> str:
    _, hold = place
    return f"{hold} is at iteration {hold.stepped}" if hold.seeded else f"{hold} is not seeded"


def _seen(node: Node) -> tuple[int, ...]:
    """Moves with every byte and every record that comes."""
    groups = node.groups.values()
    return (*(reader.bytes for reader in node.readers), *(group.records.count for group in groups))


def settle(node: Node, job: str, iteration: int, run: str) -> pb.NodeStatus:
    """Step up to the target, then drop streams and gradients. A hold that can't, or of another run, goes."""
    check_job(node.job, job)
    with node.changed:
        if not node.fenced and node.groups:
            raise Refused("the node is not fenced: call Fence first", precondition=True)
        holds = list(node.holds)
    for group, hold in holds:
        _settle(node, group, hold, iteration, run)
    with node.changed:
        node.forget()
    return node_status(node, job)


def _settle(node: Node, group: Group, hold: Hold, iteration: int, run: str) -> None:
    fits = hold.seeded and not hold.doubtful and group.begin.run == run
    while fits and hold.stepped == hold.released < min(iteration, hold.in_full):
        node.step(group, hold, hold.released + 1)
    if fits and hold.stepped == iteration and not hold.doubtful:
        hold.settle()
        return
    hold.close()
    with node.changed:
        if hold in group.holds:
            group.holds.remove(hold)
            if hold.holds_something:
                asked = f"given up when a restart asked for iteration {iteration}"
                why = f"{hold}: {asked}: {_why(group, hold, run)}"
                group.dropped[hold.plan.shard] = why
                log.warning("%s", why)


def _why(group: Group, hold: Hold, run: str) -> str:
    """Why a hold is of no use to a restart."""
    if group.begin.run != run:
        return f"it was of run {group.begin.run}, not of {run}"
    stood = f"it had stepped iteration {hold.stepped}" if hold.seeded else "it was not seeded"
    return hold.trouble or stood
