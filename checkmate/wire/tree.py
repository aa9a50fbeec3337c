"""The double binary tree: the places of ranks in it, and the slicing of buckets that go over it. Pure.

Two trees each reduce half of a bucket, towards their roots and back: rank 0 is the root of one, the last rank
that of the other. A root has one child, so the fully reduced half leaves it once, and there it is tagged.
Each rank but the roots has children in one of the trees only, so that both together use the links of all
ranks (P. Sanders, J. Speck, J. L. Träff: Two-tree algorithms for full bandwidth broadcast, reduction and
scan, 2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from checkmate.wire.schedule import (
    FIRST,
    Bucket,
    Chunk,
    TaggedSlicing,
    channel_slice,
    equal_part,
    tagged_chunks,
)

KIND: Final = "tree"
TREE_BYTES: Final = 256 << 10
"""Buckets up to this size go over the trees by default: for larger ones a ring is faster."""
TREE_BYTES_MAX: Final = 1 << 31
"""Half of a bucket is a chunk, whose length must be below this."""
MIN_RANKS: Final = 3
"""With two ranks, trees and ring send the same bytes, so the ring has them all."""
FASTER_RANKS: Final = 8
"""From this number on, trees are faster (docs/figures.md); smaller groups have none by default."""


@dataclass(frozen=True, slots=True)
class TreePlace:
    """The ranks beside one in a tree: its parent, if it is not the root, and up to two children."""

    parent: int | None
    children: tuple[int, ...]


def tree_place(ranks: int, rank: int, side: int) -> TreePlace:
    """Return a rank's place in the tree whose root is a side's boundary rank."""
    shift = 0 if side == FIRST else 1  # the second tree is the first one, with each rank at the next place
    at = (rank + shift) % ranks
    beside = [(position - shift) % ranks for position in _children(ranks, at)]
    return TreePlace((_parent(ranks, at) - shift) % ranks if at else None, tuple(beside))


def _parent(ranks: int, position: int) -> int:
    """Return the parent of a position, above 0, of a binary search tree under 0, whose leaves are odd."""
    step = position & -position
    above = (position - step) | (2 * step)
    return above if above < ranks else position - step


def _children(ranks: int, position: int) -> list[int]:
    """Return the positions whose parent this is: at distances that are powers of two, up to its own."""
    step = position & -position if position else 1 << (ranks - 1).bit_length()
    near = []
    while step := step // 2:
        near += [position - step, position + step]
    return sorted(child for child in near if 0 < child < ranks and _parent(ranks, child) == position)


def tree_slice(elements: int, channels: int, channel: int, side: int) -> range:
    """Return the elements of a bucket that one tree reduces on `channel`, of `channels` that it has."""
    return equal_part(channel_slice(elements, channels, channel), 2, side)


@dataclass(frozen=True, slots=True)
class TreeSlicing(TaggedSlicing):
    """The slicing of small buckets by the trees, and of larger ones by Checkmate's ring.

    Of C channels of the ring, the trees' streams are those after: C to 2C - 1.
    """

    tree_bytes: int = TREE_BYTES
    """Size of the largest buckets that go over the trees."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a size that trees can't have."""
        if not 0 <= self.tree_bytes <= TREE_BYTES_MAX:
            raise ValueError(f"tree_bytes {self.tree_bytes}: must be 0 to {TREE_BYTES_MAX}")

    def by_tree(self, bucket: Bucket) -> bool:
        """Return whether a bucket goes over the trees."""
        return bucket.nbytes <= self.tree_bytes

    def tagged_chunks(
        self, bucket: Bucket, channels: int, channel: int, ranks: int, side: int
    ) -> Iterator[Chunk]:
        """Yield the non-empty chunks of one bucket in a boundary's stream on `channel`, in order."""
        if self.by_tree(bucket) != (channel >= channels):
            return
        if channel < channels:
            yield from tagged_chunks(bucket.elements, channels, channel, ranks, side)
        elif where := tree_slice(bucket.elements, channels, channel - channels, side):
            yield Chunk(0, side, where)

    def describe(self) -> Mapping[str, str | int]:
        """Return its name and parameter."""
        return {"kind": KIND, "tree_bytes": self.tree_bytes}
