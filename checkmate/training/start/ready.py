"""Waits for a group's shadow nodes: at the start until they are ready, at the end until they have stepped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from checkmate.nodes.standing import node_name
from checkmate.nodes.stubs import UNREACHABLE, Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.start.membership import Membership
from checkmate.wording import at_iteration, counted

_POLL_SECONDS: Final = 0.1
_FIRST_POLL_SECONDS: Final = 0.01
"""Streams take some 50 ms to connect after a restart; each further poll waits longer."""
_STATUS_SECONDS: Final = 2.0

_CONTROLLER: Final = "streams need `checkmate run` of this job: `checkmate status JOB` shows them"

Holds = Mapping[int, Mapping[int, pb.HoldStatus] | str]
"""By node: its holds by shard, or why it has not answered."""


def await_ready(place: Membership, stubs: Stubs, incarnation: int, deadline: float) -> str:
    """Wait until all holds of the group are connected and seeded. Return in words those that are not."""
    pause = _FIRST_POLL_SECONDS
    while True:
        lacking = _lacking(place, stubs, incarnation)
        if not lacking or time.monotonic() > deadline:
            hint = [_CONTROLLER] if any("streams are connected" in one for one in lacking) else []
            return "; ".join([*lacking, *hint])
        time.sleep(pause)
        pause = min(1.5 * pause, _POLL_SECONDS)


def await_stepped(place: Membership, stubs: Stubs, incarnation: int, iteration: int, deadline: float) -> str:
    """Wait until all live holds of the group have stepped an iteration. Return missing shards in words."""
    while True:
        found = _holds(place, stubs, incarnation)
        holds = [hold for held in found.values() if not isinstance(held, str) for hold in held.values()]
        there = {hold.shard.shard for hold in holds if hold.seeded and hold.stepped >= iteration}
        missing = [shard for shard in range(place.shards) if shard not in there]
        silent = [found[node.id] for shard in missing for node in place.holders(shard)]
        waiting = any(hold.live and hold.stepped < iteration for hold in holds)
        waiting |= any(isinstance(one, str) and not one.startswith(UNREACHABLE) for one in silent)
        if waiting and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
            continue
        return "; ".join(f"shard {shard}: {_progress(place, shard, found)}" for shard in missing)


def _progress(place: Membership, shard: int, found: Holds) -> str:
    """Return the progress of a shard's holders, in words."""
    words = []
    for node in place.holders(shard):
        holds = found[node.id]
        if isinstance(holds, str):
            words.append(f"shadow node {node.id}: {holds}")
            continue
        held = holds.get(shard)
        at = at_iteration(held.stepped) if held is not None and held.seeded else "not seeded"
        words.append(f"shadow node {node.id} is {at}")
    return ", ".join(words)


def _holds(place: Membership, stubs: Stubs, incarnation: int) -> Holds:
    """Ask the nodes for their holds of the group in this incarnation."""
    nodes, ours = [node.id for node in place.nodes], (place.group, incarnation)
    found: dict[int, dict[int, pb.HoldStatus] | str] = {}
    for node, status in stubs.statuses(nodes, _STATUS_SECONDS).items():
        if isinstance(status, str):
            found[node] = status
        else:
            holds = [hold for hold in status.holds if (hold.shard.group, hold.incarnation) == ours]
            found[node] = {hold.shard.shard: hold for hold in holds}
    return found


def _lacking(place: Membership, stubs: Stubs, incarnation: int) -> list[str]:
    """Return why nodes of the group are not ready, in words; empty if all are."""
    found = []
    for number, holds in _holds(place, stubs, incarnation).items():
        if isinstance(holds, str):
            found.append(f"{node_name(place.job, number)}: {holds}")
            continue
        for shard in range(place.shards):
            ours = number in [node.id for node in place.holders(shard)]
            if ours and (trouble := _not_ready(holds.get(shard))):
                found.append(f"shadow node {number}, shard {shard}: {trouble}")
    return found


def _not_ready(hold: pb.HoldStatus | None) -> str:
    """Return why a hold can't follow yet, or ""."""
    if hold is None:
        return "not begun"
    if hold.connected < hold.streams:
        return f"{hold.connected} of {counted(hold.streams, 'stream')} connected"
    return "" if hold.seeded else "not seeded"
