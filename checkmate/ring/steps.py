"""The slices that one rank sends and receives on one channel for one bucket. Pure.

The AllGather's rounds are numbered from 0 to n - 2; the reduce-scatter's n - 1 rounds precede them, from
-(n - 1) to -1. In every round a rank sends the chunk that it received in the round before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from checkmate.wire.schedule import Bucket, chunk_received, chunk_sent, chunk_slice, tags

SLICE_BYTES = 1 << 20
"""A multiple of every element's size."""


class Arrival(Enum):
    """The operation on bytes that arrive."""

    KEEP = "keep"
    """Replace the bucket's content."""
    ADD = "add"
    """Add to it."""
    AVERAGE = "average"
    """Add to it, and divide the sum by the number of ranks, unless sums are wanted: the chunk is reduced."""


@dataclass(frozen=True, slots=True)
class Send:
    """A slice to send: bytes [start, stop) of the bucket."""

    start: int
    stop: int
    chunk: int
    """The length of the chunk of which this is the first slice, or 0."""
    shadow_id: int | None
    """The tag; `None` for untagged bytes."""
    after: int
    """The number of the bucket's receives that must be done before."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A slice to receive: bytes [start, stop) of the bucket."""

    start: int
    stop: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class RingSteps:
    """All sends and all receives of a bucket, each in order."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's place in a ring, on one channel."""

    rank: int
    ranks: int
    channel: int
    channels: int


def allgather_steps(bucket: Bucket, at: Position, slice_bytes: int = SLICE_BYTES) -> RingSteps:
    """Return the steps of an AllGather (design, section 3). Rank i contributes chunk (i + 1) mod n."""
    return _steps(bucket, at, slice_bytes, range(at.ranks - 1))


def allreduce_steps(bucket: Bucket, at: Position, slice_bytes: int = SLICE_BYTES) -> RingSteps:
    """Return the steps of a reduce-scatter, the averaging by each chunk's owner, and the AllGather.

    Chunk k is summed from rank k on, in ring order, so it ends at the rank where its AllGather begins. An
    element's bits depend on its place in its bucket and on the division into channels and chunks, but not on
    timing or the slice size (design, section 3).
    """
    return _steps(bucket, at, slice_bytes, range(1 - at.ranks, at.ranks - 1))


def _steps(bucket: Bucket, at: Position, slice_bytes: int, rounds: range) -> RingSteps:
    """Return the steps of some rounds. A slice is forwarded before the rest of its chunk has arrived."""
    sends: list[Send] = []
    receives: list[Receive] = []
    before = 0  # receives before the last round's chunk
    for round_ in rounds:
        shadow_id = bucket.shadow_id if round_ >= 0 and tags(at.ranks, at.rank, round_) else None
        start, stop = _bytes(bucket, at, chunk_sent(at.ranks, at.rank, round_))
        for number, (first, last) in enumerate(slices(start, stop, slice_bytes)):
            chunk = 0 if number else stop - start
            after = 0 if round_ == rounds.start else before + number + 1
            sends.append(Send(first, last, chunk, shadow_id, after))
        before = len(receives)
        coming = _bytes(bucket, at, chunk_received(at.ranks, at.rank, round_))
        arrival = Arrival.KEEP if round_ >= 0 else Arrival.AVERAGE if round_ == -1 else Arrival.ADD
        receives += [Receive(*piece, arrival) for piece in slices(*coming, slice_bytes)]
    return RingSteps(tuple(sends), tuple(receives))


def _bytes(bucket: Bucket, at: Position, chunk: int) -> tuple[int, int]:
    where = chunk_slice(bucket.elements, at.channels, at.channel, at.ranks, chunk)
    return where.start * bucket.itemsize, where.stop * bucket.itemsize


def slices(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of the pieces of at most `size` bytes, in order."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)
