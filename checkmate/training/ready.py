"""Waits, at the start, until a group's shadow nodes can follow: connected and seeded."""

from __future__ import annotations

import time
from typing import Final

from checkmate.nodes.shards import node_name
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.session import Session

_POLL_SECONDS: Final = 0.1
_STATUS_SECONDS: Final = 2.0


def await_ready(place: Session, stubs: Stubs, incarnation: int, deadline: float) -> str:
    """Wait until all holds of the group are connected and seeded; what isn't, by then."""
    while True:
        lacking = _lacking(place, stubs, incarnation)
        if not lacking or time.monotonic() > deadline:
            return "; ".join(lacking)
        time.sleep(_POLL_SECONDS)


def _lacking(place: Session, stubs: Stubs, incarnation: int) -> list[str]:
    """What keeps the group's nodes from following, if anything does."""
    found = []
    request = pb.StatusRequest(job=place.job.job)
    nodes = {node.id: node for node in place.nodes}
    for number, status in stubs.ask(nodes, lambda stub: stub.Status, request, _STATUS_SECONDS).items():
        if isinstance(status, str):
            found.append(f"{node_name(place.job, number)}: {status}")
            continue
        held = {
            hold.shard.shard: hold
            for hold in status.holds
            if (hold.shard.group, hold.incarnation) == (place.group, incarnation)
        }
        for shard in range(place.shards):
            if nodes[number] in place.holders(shard) and (trouble := _not_ready(held.get(shard))):
                found.append(f"shadow node {number}, shard {shard}: {trouble}")
    return found


def _not_ready(hold: pb.HoldStatus | None) -> str:
    """Why a hold can't follow yet; empty where it can."""
    if hold is None:
        return "not begun"
    if hold.connected < hold.streams:
        return f"{hold.connected} of {hold.streams} streams are connected"
    return "" if hold.seeded else "not seeded"
