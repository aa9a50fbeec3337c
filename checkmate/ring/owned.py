"""Reduction of each bucket to the one rank that owns it, and its broadcast from there. Pure.

Both go along the ring, one slice after another. The rank after the owner begins a sum, and each of the
others adds its part, the owner last. So the order of additions depends on the ranks' places alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.ring.steps import SLICE_BYTES, Arrival, Position, Receive, RingSteps, Send, slices
from checkmate.wire.schedule import Bucket


@dataclass(frozen=True, slots=True)
class OwnedBucket(Bucket):
    """A bucket that one rank of the ring owns."""

    owner: int


def reduce_steps(bucket: OwnedBucket, at: Position, slice_bytes: int = SLICE_BYTES) -> RingSteps:
    """Return the steps after which the owner has the sum, and other ranks parts of it."""
    return _chain(bucket, (at.rank - bucket.owner - 1) % at.ranks, at.ranks, slice_bytes, Arrival.ADD)


def broadcast_steps(bucket: OwnedBucket, at: Position, slice_bytes: int = SLICE_BYTES) -> RingSteps:
    """Return the steps after which all ranks have what the owner has."""
    return _chain(bucket, (at.rank - bucket.owner) % at.ranks, at.ranks, slice_bytes, Arrival.KEEP)


def _chain(bucket: Bucket, place: int, ranks: int, slice_bytes: int, arrival: Arrival) -> RingSteps:
    """Return the steps of a rank at a place of a chain: the first only sends, the last only receives."""
    pieces = list(slices(0, bucket.nbytes, slice_bytes))
    sends = [
        Send(*piece, chunk=0 if number else bucket.nbytes, shadow_id=None, after=number + 1 if place else 0)
        for number, piece in enumerate(pieces)
        if place < ranks - 1
    ]
    return RingSteps(tuple(sends), tuple(Receive(*piece, arrival) for piece in pieces if place))
