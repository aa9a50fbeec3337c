"""The slicing of copies by hosts: each rank of a DP group sends one contiguous part of its gradients. Pure.

All ranks have the same reduced gradients, N bytes, so a copy by n ranks costs each N/n. A part is contiguous,
over the shards in order, so that it is of few shards, and a rank has few connections (design, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from checkmate.wire.schedule import Bucket, Chunk, Piece, StreamLayout, StreamName

KIND: Final = "parts"


@dataclass(frozen=True, slots=True)
class PartSlicing:
    """The rank at position p of n sends the bytes [N p // n, N (p + 1) // n), cut at whole elements.

    N are the bytes that all ranks have. A bucket that only one rank has is sent by that rank, whole.
    """

    def is_sender(self, position: int, ranks: int) -> bool:
        """Return whether the rank at a position of its group sends streams: each does."""
        return 0 <= position < ranks

    def stream(
        self, buckets: Sequence[Bucket], stream: StreamName, channels: int, ranks: int
    ) -> StreamLayout:
        """Return the places of the bytes of a rank's part that are in a shard."""
        total = sum(bucket.nbytes for bucket in buckets if bucket.owner is None)
        first, stop = total * stream.sender // ranks, total * (stream.sender + 1) // ranks
        order = sorted(range(len(buckets)), key=lambda index: (buckets[index].shadow_id, index))
        pieces, before, offset = [], 0, 0
        for index in order:
            bucket = buckets[index]
            if bucket.owner is None:
                where = range(_element(bucket, first - before), _element(bucket, stop - before))
                before += bucket.nbytes
            else:
                where = range(bucket.elements if bucket.owner == stream.sender else 0)
            if where and bucket.shadow_id == stream.shard:
                pieces.append(Piece(offset, index, where))
                offset += len(where) * bucket.itemsize
        return StreamLayout(tuple(pieces), tuple(bucket.itemsize for bucket in buckets), offset)

    def tagged_chunks(
        self, bucket: Bucket, channels: int, channel: int, ranks: int, side: int
    ) -> Iterator[Chunk]:
        """Yield nothing: no switch copies."""
        yield from ()

    def describe(self) -> Mapping[str, str | int]:
        """Return its name."""
        return {"kind": KIND}


def _element(bucket: Bucket, nbytes: int) -> int:
    """Return the element of a bucket in which this byte of it is, within the bucket's bounds."""
    return min(max(nbytes, 0) // bucket.itemsize, bucket.elements)
