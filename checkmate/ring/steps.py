"""What one rank sends and receives on one channel for one bucket, slice by slice. Pure.

Rounds are counted from the AllGather's first, 0 to n - 2; the reduce-scatter's n - 1 rounds come before, from
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
    """What becomes of bytes that arrive."""

    KEEP = "keep"
    """They replace what the bucket holds."""
    ADD = "add"
    """They are added to it."""
    AVERAGE = "average"
    """They are added to it, and the sum is divided by the number of ranks: the chunk is reduced."""


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes [start, stop) of the bucket, to be sent when `after` of its receives are done.

    `chunk` is the chunk's length where this is its first slice, else 0; `shadow_id` None is untagged.
    """

    start: int
    stop: int
    chunk: int
    shadow_id: int | None
    after: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Bytes [start, stop) of the bucket."""

    start: int
    stop: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class RingSteps:
    """All sends and all receives, each in order."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's place in a ring with channels; the channel that is meant."""

    rank: int
    ranks: int
    channel: int
    channels: int


def allgather_steps(bucket: Bucket, at: Position, slice_bytes: int = SLICE_BYTES) -> RingSteps:
    """An AllGather (design, section 3): rank i brings chunk (i + 1) mod n."""
    return _steps(bucket, at, slice_bytes, range(at.ranks - 1))


def allreduce_steps(bucket: Bucket, at: Position, slice_bytes: int = SLICE_BYTES) -> RingSteps:
    """Reduce-scatter, average by each chunk's owner, and the AllGather.

    Chunk k is summed from rank k on, in ring order, and so ends where the AllGather begins with it.
    """
    return _steps(bucket, at, slice_bytes, range(1 - at.ranks, at.ranks - 1))


def _steps(bucket: Bucket, at: Position, slice_bytes: int, rounds: range) -> RingSteps:
    """A slice is passed on in the next round as soon as it is here, before the rest of its chunk is."""
    sends: list[Send] = []
    receives: list[Receive] = []
    before = 0  # receives done when the last round's chunk began to come
    for round_ in rounds:
        shadow_id = bucket.shadow_id if round_ >= 0 and tags(at.ranks, at.rank, round_) else None
        start, stop = _bytes(bucket, at, chunk_sent(at.ranks, at.rank, round_))
        for number, (first, last) in enumerate(_slices(start, stop, slice_bytes)):
            chunk = 0 if number else stop - start
            after = 0 if round_ == rounds.start else before + number + 1
            sends.append(Send(first, last, chunk, shadow_id, after))
        before = len(receives)
        coming = _bytes(bucket, at, chunk_received(at.ranks, at.rank, round_))
        receives += [Receive(*piece, _arrival(round_)) for piece in _slices(*coming, slice_bytes)]
    return RingSteps(tuple(sends), tuple(receives))


def _arrival(round_: int) -> Arrival:
    if round_ >= 0:
        return Arrival.KEEP
    return Arrival.AVERAGE if round_ == -1 else Arrival.ADD


def _bytes(bucket: Bucket, at: Position, chunk: int) -> tuple[int, int]:
    where = chunk_slice(bucket.elements, at.channels, at.channel, at.ranks, chunk)
    return where.start * bucket.itemsize, where.stop * bucket.itemsize


def _slices(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, size):
        yield first, min(first + size, stop)
