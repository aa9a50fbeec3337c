"""The order in which a rank passes slices on in one tree. Pure.

Sums go from the leaves to the root, and results back. A rank adds what its children send in their order, so
that an element's bits do not depend on timing, and passes each slice on before the next one has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Final, NamedTuple

from checkmate.ring.steps import Arrival, slices
from checkmate.wire.schedule import Bucket
from checkmate.wire.tree import TreePlace, tree_slice

SLICE_BYTES: Final = 128 << 10
"""A multiple of every element's size; smaller than the ring's, because it passes a rank at each level."""


class TreeWay(Enum):
    """What a connection of a tree carries, and which end of it a rank has."""

    SUM_IN = "sum from a child"
    SUM_OUT = "sum to the parent"
    RESULT_IN = "result from the parent"
    RESULT_OUT = "result to a child"

    @property
    def sends(self) -> bool:
        """Whether the rank sends on it."""
        return self in (TreeWay.SUM_OUT, TreeWay.RESULT_OUT)


class TreeLink(NamedTuple):
    """A rank's end of one connection in a tree."""

    way: TreeWay
    child: int = 0
    """The number of the child at the other end, 0 or 1; 0 for the parent."""


class TreeSlice(NamedTuple):
    """A slice that passes through a tree: bytes [start, stop) of a bucket, by its index."""

    bucket: int
    start: int
    stop: int
    chunk: int
    """The length of all of the bucket's slices if this is the first of them, or 0."""


def links(place: TreePlace) -> list[TreeLink]:
    """Return a rank's links in a tree; those towards the parent first."""
    up = [] if place.parent is None else [TreeLink(TreeWay.SUM_OUT), TreeLink(TreeWay.RESULT_IN)]
    return [
        *up,
        *(
            TreeLink(way, n)
            for n in range(len(place.children))
            for way in (TreeWay.SUM_IN, TreeWay.RESULT_OUT)
        ),
    ]


def tree_slices(
    buckets: Sequence[Bucket], channels: int, channel: int, side: int, slice_bytes: int = SLICE_BYTES
) -> Iterator[TreeSlice]:
    """Yield the slices of buckets that pass through one tree on one channel, in order."""
    for index, bucket in enumerate(buckets):
        where = tree_slice(bucket.elements, channels, channel, side)
        start, stop = where.start * bucket.itemsize, where.stop * bucket.itemsize
        for number, (first, last) in enumerate(slices(start, stop, slice_bytes)):
            yield TreeSlice(index, first, last, 0 if number else stop - start)


@dataclass(frozen=True, slots=True)
class SliceSequence:
    """The slices of all buckets of one iteration, which follow each other again and again."""

    slices: tuple[TreeSlice, ...]
    ends: tuple[int, ...]
    """Of each bucket, the number of slices up to its end."""

    @classmethod
    def of(cls, slices: Sequence[TreeSlice], buckets: int) -> SliceSequence:
        """Return them for this number of buckets, of which some may have no slice."""
        of_bucket = [0] * buckets
        for part in slices:
            of_bucket[part.bucket] += 1
        return cls(tuple(slices), tuple(accumulate(of_bucket)))

    def slices_until(self, buckets: int) -> int:
        """Return the number of slices of this many buckets, counted over all iterations."""
        iterations, rest = divmod(buckets, len(self.ends))
        return iterations * len(self.slices) + (self.ends[rest - 1] if rest else 0)

    def slice(self, number: int) -> TreeSlice:
        """Return a slice by its number over all iterations."""
        return self.slices[number % len(self.slices)]


class TreeProgress:
    """How far a rank is in one tree, in slices that have passed each of its links."""

    def __init__(self, place: TreePlace) -> None:
        """Begin, with no slice to pass."""
        self._counts = dict.fromkeys(links(place), 0)
        self._children = len(place.children)
        self.is_root = place.parent is None
        self._submitted = 0

    def submit(self, slices: int) -> None:
        """Let slices up to this number pass."""
        self._submitted = slices

    def passed(self, link: TreeLink) -> int:
        """Return how many slices have passed a link, which is the number of the next one."""
        return self._counts[link]

    def may_pass(self, link: TreeLink) -> bool:
        """Return whether the next slice may pass a link."""
        return self._counts[link] < self._limit(link)

    def note_passed(self, link: TreeLink) -> None:
        """Note that a slice has passed a link: it is received and added, or with the kernel."""
        self._counts[link] += 1

    def arrival(self, link: TreeLink) -> Arrival:
        """Return the operation on bytes that arrive on a link. The root's last one completes the sum."""
        if link.way is TreeWay.RESULT_IN:
            return Arrival.KEEP
        return Arrival.AVERAGE if self.is_root and link.child == self._children - 1 else Arrival.ADD

    @property
    def complete(self) -> int:
        """The number of slices that are results here, and with all children's kernels."""
        return min(self._results, *self._of(TreeWay.RESULT_OUT), self._submitted)

    @property
    def _sums(self) -> int:
        """The number of slices to which all children's parts are added."""
        return min(*self._of(TreeWay.SUM_IN), self._submitted) if self._children else self._submitted

    @property
    def _results(self) -> int:
        return self._sums if self.is_root else self._counts[TreeLink(TreeWay.RESULT_IN)]

    def _of(self, way: TreeWay) -> list[int]:
        return [self._counts[TreeLink(way, child)] for child in range(self._children)] or [self._submitted]

    def _limit(self, link: TreeLink) -> int:
        match link.way:
            case TreeWay.SUM_IN:  # after the child before, for the order of additions
                return (
                    self._counts[TreeLink(TreeWay.SUM_IN, link.child - 1)] if link.child else self._submitted
                )
            case TreeWay.SUM_OUT:
                return self._sums
            case TreeWay.RESULT_IN:  # it takes the place of this rank's sum
                return self._counts[TreeLink(TreeWay.SUM_OUT)]
            case TreeWay.RESULT_OUT:
                return self._results
