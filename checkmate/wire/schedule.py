"""The ring's schedule and the slicing of buckets: which bytes travel when, and who tags them.

Pure functions (design, section 3; paper, section "Heartbeat-based Tagging"). Both sides compute them:
trainers to know what to send and tag, shadow nodes to know where each byte of a stream belongs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FIRST, LAST = 0, 1
"""A boundary's side: the ring's first rank, or its last."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of a bucket."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tagged chunk as it goes through a stream: its round, its index in the ring and its elements."""

    round: int
    index: int
    where: Slice


def cut(length: int, parts: int, index: int) -> Slice:
    """Part `index` of `length` elements cut into `parts`: [length*i//parts, length*(i+1)//parts)."""
    return Slice(length * index // parts, length * (index + 1) // parts)


def channel_slice(elements: int, channels: int, channel: int) -> Slice:
    """The elements of a bucket that `channel` carries."""
    return cut(elements, channels, channel)


def chunk_slice(elements: int, channels: int, channel: int, ranks: int, chunk: int) -> Slice:
    """The elements of chunk `chunk` of `channel`, within the bucket."""
    whole = channel_slice(elements, channels, channel)
    part = cut(len(whole), ranks, chunk)
    return Slice(whole.start + part.start, whole.start + part.stop)


def chunk_sent(ranks: int, rank: int, round_: int) -> int:
    """Which chunk `rank` sends in an AllGather round, 0 <= round < ranks - 1."""
    return (rank + 1 - round_) % ranks


def chunk_received(ranks: int, rank: int, round_: int) -> int:
    """Which chunk `rank` receives in an AllGather round: what the rank before it sends."""
    return chunk_sent(ranks, rank - 1, round_)


def tags(ranks: int, rank: int, round_: int) -> bool:
    """Whether `rank` tags what it sends: rank 0 its round 0 chunk, the last rank all of its own."""
    return rank == ranks - 1 or (rank == 0 and round_ == 0)


def side_of(ranks: int, rank: int) -> int | None:
    """The boundary side of a rank, `None` where it isn't a boundary rank."""
    if rank == 0:
        return FIRST
    return LAST if rank == ranks - 1 else None


def tagged_chunks(elements: int, channels: int, channel: int, ranks: int, side: int) -> Iterator[Chunk]:
    """The chunks of one bucket that a boundary's stream carries on `channel`, in order; no empty ones."""
    rank = 0 if side == FIRST else ranks - 1
    for round_ in range(ranks - 1):
        if tags(ranks, rank, round_):
            index = chunk_sent(ranks, rank, round_)
            where = chunk_slice(elements, channels, channel, ranks, index)
            if len(where):
                yield Chunk(round_, index, where)


def stream_elements(elements: int, channels: int, channel: int, ranks: int, side: int) -> int:
    """How many elements of one bucket pass through a boundary's stream on `channel`."""
    return sum(len(c.where) for c in tagged_chunks(elements, channels, channel, ranks, side))


def nic_of(channel: int, side: int, nics: int) -> int:
    """The shadow node's NIC, by index, that receives stream (side, channel)."""
    return (channel + side) % nics


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat bucket of gradients: how many elements of how many bytes, and the shard that they belong to."""

    elements: int
    itemsize: int
    shadow_id: int

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """A tagged chunk's place: `offset` bytes into the stream's iteration, elements `where` of `bucket`."""

    offset: int
    bucket: int
    where: Slice


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of a bucket, in a stream's iteration `iteration` (counted from its byte 0)."""

    iteration: int
    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class StreamLayout:
    """Where one iteration's bytes of a stream belong; every iteration has the same layout.

    `nbytes` is K of the design, section 7: iteration t begins at byte K x (t - t0) of the stream.
    """

    pieces: tuple[Piece, ...]
    itemsizes: tuple[int, ...]
    nbytes: int

    def place(self, offset: int) -> tuple[int, Piece]:
        """The iteration and the piece that hold byte `offset` of the stream.

        `IndexError` where nothing is ever in it.
        """
        if not self.nbytes or offset < 0:
            raise IndexError(f"the stream has no byte {offset}")
        iteration, within = divmod(offset, self.nbytes)
        return iteration, self.pieces[bisect_right(self.pieces, within, key=lambda piece: piece.offset) - 1]

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Where bytes [start, stop) of the stream belong, in order and without a gap."""
        while start < stop:
            iteration, piece = self.place(start)
            size = self.itemsizes[piece.bucket]
            within = start - iteration * self.nbytes - piece.offset
            first = piece.where.start * size + within
            last = min(piece.where.stop * size, first + stop - start)
            yield Span(iteration, piece.bucket, first, last)
            start += last - first


def stream_layout(
    buckets: Sequence[Bucket], channels: int, channel: int, ranks: int, *, side: int, shadow_id: int
) -> StreamLayout:
    """The layout of stream (side, channel, shadow id) when the ring gathers `buckets` in this order."""
    pieces = []
    offset = 0
    for index, bucket in enumerate(buckets):
        if bucket.shadow_id != shadow_id:
            continue
        for chunk in tagged_chunks(bucket.elements, channels, channel, ranks, side):
            pieces.append(Piece(offset, index, chunk.where))
            offset += len(chunk.where) * bucket.itemsize
    return StreamLayout(tuple(pieces), tuple(bucket.itemsize for bucket in buckets), offset)
