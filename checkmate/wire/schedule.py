"""The ring's schedule and the slicing of buckets: bytes sent in each round, and the ranks that tag them.

Pure functions (design, section 3; paper, section "Heartbeat-based Tagging"). Trainers use them to send and
tag chunks, and shadow nodes to map each byte of a stream to its bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

FIRST, LAST = 0, 1
"""The side of a boundary: the ring's first or last rank."""
SIDES: Final = (FIRST, LAST)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tagged chunk of a stream: its round, its index in the ring and its elements."""

    round: int
    index: int
    where: range


def equal_part(whole: range, parts: int, index: int) -> range:
    """Return part `index` of N elements: [N*i//parts, N*(i+1)//parts)."""
    return whole[len(whole) * index // parts : len(whole) * (index + 1) // parts]


def channel_slice(elements: int, channels: int, channel: int) -> range:
    """Return the elements of a bucket that `channel` carries."""
    return equal_part(range(elements), channels, channel)


def chunk_slice(elements: int, channels: int, channel: int, ranks: int, chunk: int) -> range:
    """Return the elements of chunk `chunk` of `channel`, within the bucket."""
    return equal_part(channel_slice(elements, channels, channel), ranks, chunk)


def chunk_sent(ranks: int, rank: int, round_: int) -> int:
    """Return the chunk that `rank` sends in an AllGather round, 0 <= round < ranks - 1.

    Rounds before 0, down to 1 - ranks, are those of the ReduceScatter before it.
    """
    return (rank + 1 - round_) % ranks


def chunk_received(ranks: int, rank: int, round_: int) -> int:
    """Return the chunk that `rank` receives in an AllGather round, from the rank before it."""
    return chunk_sent(ranks, rank - 1, round_)


def tags(ranks: int, rank: int, round_: int) -> bool:
    """Return whether `rank` tags its chunk: rank 0 in round 0, the last rank in every round."""
    return rank == ranks - 1 or (rank == 0 and round_ == 0)


def side_of(ranks: int, rank: int) -> int | None:
    """Return the boundary side of a rank, or `None` if it is not a boundary rank."""
    if rank == 0:
        return FIRST
    return LAST if rank == ranks - 1 else None


def tagged_chunks(elements: int, channels: int, channel: int, ranks: int, side: int) -> Iterator[Chunk]:
    """Yield the non-empty chunks of one bucket in a boundary's stream on `channel`, in order."""
    rank = 0 if side == FIRST else ranks - 1
    for round_ in range(ranks - 1):
        if tags(ranks, rank, round_):
            index = chunk_sent(ranks, rank, round_)
            where = chunk_slice(elements, channels, channel, ranks, index)
            if len(where):
                yield Chunk(round_, index, where)


def nic_of(channel: int, side: int, nics: int) -> int:
    """Return the index of the shadow node's NIC that receives stream (side, channel)."""
    return (channel + side) % nics


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat bucket of gradients: the number of elements, their size in bytes, and their shard."""

    elements: int
    itemsize: int
    shadow_id: int
    owner: int | None = None
    """The position of the only rank that has it; `None` if all have it."""

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.elements * self.itemsize


class StreamName(NamedTuple):
    """The name of a stream within its DP group and its holder."""

    sender: int
    """The position of the rank that sends it, in the group."""
    channel: int
    shard: int


class Slicing(Hashable, Protocol):
    """The way in which an AllReduce cuts buckets. The layout has it, so that both sides cut alike."""

    def tagged_chunks(
        self, bucket: Bucket, channels: int, channel: int, ranks: int, side: int
    ) -> Iterator[Chunk]:
        """Yield the non-empty chunks of one bucket in a boundary's stream on `channel`, in order."""

    def is_sender(self, position: int, ranks: int) -> bool:
        """Return whether the rank at a position of its group sends streams."""

    def stream(
        self, buckets: Sequence[Bucket], stream: StreamName, channels: int, ranks: int
    ) -> StreamLayout:
        """Return the places of a stream's bytes in buckets that are reduced in this order."""

    def describe(self) -> Mapping[str, str | int]:
        """Return its name, as `kind`, and its parameters."""


class TaggedSlicing(ABC):
    """A slicing whose streams are those of the two boundary ranks."""

    __slots__ = ()

    @abstractmethod
    def tagged_chunks(
        self, bucket: Bucket, channels: int, channel: int, ranks: int, side: int
    ) -> Iterator[Chunk]:
        """Yield the non-empty chunks of one bucket in a boundary's stream on `channel`, in order."""

    @abstractmethod
    def describe(self) -> Mapping[str, str | int]:
        """Return its name, as `kind`, and its parameters."""

    def is_sender(self, position: int, ranks: int) -> bool:
        """Return whether the rank at a position of its group sends streams: a boundary rank."""
        return side_of(ranks, position) is not None

    def stream(
        self, buckets: Sequence[Bucket], stream: StreamName, channels: int, ranks: int
    ) -> StreamLayout:
        """Return the places of a stream's bytes in buckets that are reduced in this order.

        Raise `ValueError` if the rank does not tag.
        """
        if (side := side_of(ranks, stream.sender)) is None:
            raise ValueError(f"the rank at position {stream.sender} of {ranks} does not tag")
        return stream_layout(
            buckets, channels, stream.channel, ranks, side=side, shadow_id=stream.shard, slicing=self
        )


@dataclass(frozen=True, slots=True)
class RingSlicing(TaggedSlicing):
    """The slicing of Checkmate's own ring. It has no parameters."""

    def tagged_chunks(
        self, bucket: Bucket, channels: int, channel: int, ranks: int, side: int
    ) -> Iterator[Chunk]:
        """Yield the non-empty chunks of one bucket in a boundary's stream on `channel`, in order."""
        yield from tagged_chunks(bucket.elements, channels, channel, ranks, side)

    def describe(self) -> Mapping[str, str | int]:
        """Return its name."""
        return {"kind": "ring"}


RING_SLICING: Slicing = RingSlicing()


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of a tagged chunk: `offset` in the stream's iteration, elements `where` of `bucket`."""

    offset: int
    bucket: int
    where: range


@dataclass(frozen=True)
class StreamLayout:
    """The places of a stream's bytes in buckets, which are the same in every iteration.

    `nbytes` is K of the design, section 7: iteration t begins at byte K x (t - t0) of the stream.
    """

    pieces: tuple[Piece, ...]
    itemsizes: tuple[int, ...]
    nbytes: int


def stream_layout(
    buckets: Sequence[Bucket],
    channels: int,
    channel: int,
    ranks: int,
    *,
    side: int,
    shadow_id: int,
    slicing: Slicing = RING_SLICING,
) -> StreamLayout:
    """Return the layout of stream (side, channel, shadow id) if `buckets` are reduced in this order.

    Chunks that continue each other are one piece.
    """
    pieces: list[Piece] = []
    offset = 0
    for index, bucket in enumerate(buckets):
        if bucket.shadow_id != shadow_id:
            continue
        for chunk in slicing.tagged_chunks(bucket, channels, channel, ranks, side):
            last = pieces[-1] if pieces else None
            if last is not None and (last.bucket, last.where.stop) == (index, chunk.where.start):
                pieces[-1] = Piece(last.offset, index, range(last.where.start, chunk.where.stop))
            else:
                pieces.append(Piece(offset, index, chunk.where))
            offset += len(chunk.where) * bucket.itemsize
    return StreamLayout(tuple(pieces), tuple(bucket.itemsize for bucket in buckets), offset)
