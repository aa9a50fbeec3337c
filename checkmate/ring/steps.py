"""What one rank sends and receives on one channel, slice by slice, in an AllGather of all buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkmate.schedule import Bucket, chunk_received, chunk_sent, chunk_slice, tags


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes [start, stop) of a bucket, to be sent when `after` receives are done.

    `chunk` is the chunk's length where this is its first slice, else 0; `shadow_id` None is untagged.
    """

    bucket: int
    start: int
    stop: int
    chunk: int
    shadow_id: int | None
    after: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Bytes [start, stop) of a bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's place in a ring with channels; the channel that is meant."""

    rank: int
    ranks: int
    channel: int
    channels: int


def allgather_steps(
    buckets: Sequence[Bucket], at: Position, slice_bytes: int
) -> tuple[list[Send], list[Receive]]:
    """All sends and all receives, each list in order; buckets go one after another, with all rounds each.

    A slice is passed on in the next round as soon as it is here, before the rest of its chunk is.
    """
    sends: list[Send] = []
    receives: list[Receive] = []
    for index, bucket in enumerate(buckets):
        before = 0  # receives done when the last round's chunk began to come
        for round_ in range(at.ranks - 1):
            shadow_id = bucket.shadow_id if tags(at.ranks, at.rank, round_) else None
            start, stop = _bytes(bucket, at, chunk_sent(at.ranks, at.rank, round_))
            for number, (first, last) in enumerate(_slices(start, stop, slice_bytes)):
                chunk = 0 if number else stop - start
                after = before + number + 1 if round_ else 0
                sends.append(Send(index, first, last, chunk, shadow_id, after))
            before = len(receives)
            coming = _bytes(bucket, at, chunk_received(at.ranks, at.rank, round_))
            receives += [Receive(index, *piece) for piece in _slices(*coming, slice_bytes)]
    return sends, receives


def _bytes(bucket: Bucket, at: Position, chunk: int) -> tuple[int, int]:
    where = chunk_slice(bucket.elements, at.channels, at.channel, at.ranks, chunk)
    return where.start * bucket.itemsize, where.stop * bucket.itemsize


def _slices(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, size):
        yield first, min(first + size, stop)
