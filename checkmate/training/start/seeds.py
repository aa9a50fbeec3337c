"""Sends parameters, optimizer state and buffers to shadow nodes as training starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.lines.seeder import Seeder
from checkmate.training.record.buffers import FIRST_BYTES, Buffers
from checkmate.training.start.membership import Membership
from checkmate.training.start.standing import Start
from checkmate.wire.layout import Layout

_log: Final = logging.getLogger("checkmate")


def seed_at_start(place: Membership, layout: Layout, start: Start, seeders: Mapping[int, Seeder]) -> None:
    """Send this rank's share of the shards to every holder that has not kept its state.

    Of n ranks, the one at ring position p sends the shards s with s mod n = p. `seeders` has the nodes that
    have begun.
    """
    for shard in range(place.position, place.shards, place.ranks):
        kept = start.plan.holders.get((place.group, shard), ()) if start.keep else ()
        for node in place.holders(shard):
            if node.id in seeders and node.id not in kept:
                seeders[node.id].want(shard, layout.of_shard(shard))


def give_buffers(
    place: Membership, buffers: Buffers, start: Start, seeders: Mapping[int, Seeder], deadline: float
) -> None:
    """Send all buffers to all nodes, unless the restored record has them; wait for that until the deadline.

    Records carry buffers too, but only a few MiB at a time: until all have arrived, no iteration is complete.
    A warning names the nodes that have not received all buffers.
    """
    if not buffers.names - start.record.buffers.keys():
        return
    iteration = start.next_iteration - 1
    records = [
        pb.IterationRecord(
            iteration=iteration,
            buffers={name: state.dumps(later(), known=True) for name, later in lot.items()},
        )
        for lot in buffers.all()
    ]
    for node, seeder in seeders.items():
        held = next(s for s in range(place.shards) if node in [one.id for one in place.holders(s)])
        seeder.give(held, records)
    without = []
    for node, seeder in seeders.items():
        if not seeder.given.wait(max(deadline - time.monotonic(), 0)):
            without.append(f"shadow node {node} (not in time)")
        elif seeder.given_up:
            without.append(f"shadow node {node} ({seeder.given_up})")
    if without:
        _log.warning(
            "buffers and frozen parameters have not all reached %s: step records carry %d MiB each, and "
            "until then a restore can't use these nodes' shards",
            ", ".join(without),
            FIRST_BYTES >> 20,
        )
