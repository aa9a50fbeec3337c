"""Waits, at the start, until a group's shadow nodes can follow: connected and seeded."""

from __future__ import annotations

import time
from typing import Final

import grpc

from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.client import Stubs, reason
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
    for node in place.nodes:
        try:
            status = stubs.to(node.id).Status(request, timeout=_STATUS_SECONDS)
        except grpc.RpcError as error:
            found.append(f"shadow node {node.id} ({node.mgmt}): {reason(error)}")
            continue
        held = {
            hold.shard.shard: hold
            for hold in status.holds
            if (hold.shard.group, hold.incarnation) == (place.group, incarnation)
        }
        for shard in range(place.shards):
            if node in place.holders(shard) and (trouble := _not_ready(held.get(shard))):
                found.append(f"shadow node {node.id}, shard {shard}: {trouble}")
    return found


def _not_ready(hold: pb.HoldStatus | None) -> str:
    """Why a hold can't follow yet; empty where it can."""
    if hold is None:
        return "not begun"
    if hold.connected < hold.streams:
        return f"{hold.connected} of {hold.streams} streams are connected"
    return "" if hold.seeded else "not seeded"
