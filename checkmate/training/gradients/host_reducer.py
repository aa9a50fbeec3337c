"""Reduces the gradients of hosts with several ranks under DDP: within the host, over the hosts, and back.

Each rank of a host owns a share of the model, which its DP group reduces over the hosts. So each gradient
crosses the network once per host (design, section 3).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.engine import RingEngine
from checkmate.ring.owned import OwnedBucket, broadcast_steps, reduce_steps
from checkmate.ring.place import RingError, RingPlace
from checkmate.ring.steps import SLICE_BYTES, Position, RingSteps
from checkmate.ring.watching import NextWatch
from checkmate.training.gradients.reducer import Ends, InOrder, zero_bucket
from checkmate.training.gradients.ring_reducer import RingReducer
from checkmate.training.gradients.staging import Staging
from checkmate.wire.layout import BucketLayout, Layout


class HostRings(AbstractContextManager["HostRings"]):
    """The connected rings of a host's ranks."""

    def __init__(self, place: RingPlace, timeout: float = 30.0) -> None:
        """Connect. `place`: that in the first ring; the second one has the ports after its ports.

        Raises `RingError` if a rank does not come, or has another configuration.
        """
        self.inward = connect_ring(place, timeout=timeout)
        try:
            beside = replace(place, ports=[port + 1 for port in place.ports])
            self.outward = connect_ring(beside, timeout=timeout)
        except BaseException:
            self.inward.close()
            raise

    def abort(self) -> None:
        """Break both, so that the host's other ranks learn of an error here."""
        self.inward.abort()
        self.outward.abort()

    def close(self) -> None:
        """Close both."""
        self.inward.close()
        self.outward.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class MergedLayout:
    """The buckets of all shares of a model as one layout, each with the number of its share."""

    layout: Layout
    owners: tuple[int, ...]


def merge(shares: Sequence[Layout]) -> MergedLayout:
    """Return the buckets of all shares in the order in which backward completes them.

    The buckets of a share keep their order.
    """
    pairs = list(_merged([list(layout.buckets) for layout in shares]))
    layout = replace(shares[0], buckets=tuple(bucket for _, bucket in pairs))
    return MergedLayout(layout, tuple(owner for owner, _ in pairs))


def _merged(queues: list[list[BucketLayout]]) -> Iterator[tuple[int, BucketLayout]]:
    """Yield the bucket that is complete first among the first ones, with its share; it is taken away."""
    while any(queues):
        owner = max(
            (i for i, buckets in enumerate(queues) if buckets), key=lambda i: (_last(queues[i][0]), -i)
        )
        yield owner, queues[owner].pop(0)


def _last(bucket: BucketLayout) -> int:
    """Return the bucket's parameter whose gradient backward completes last: the one registered first."""
    return min(place.parameter for place in bucket.places)


class HostReducer:
    """The reducer of a rank that shares its host with others of the same model.

    A bucket is summed along the host's ranks, at its owner. If that is this rank, `inner` reduces it over the
    hosts. Then it is broadcast. Each of the three has its buckets in order of index on all ranks. If a rank
    of the host ends, all of its ranks fail, whether they wait for that one or not.
    """

    def __init__(
        self, merged: MergedLayout, share: int, inner: RingReducer, rings: HostRings, *, pinned: bool = False
    ) -> None:
        """Allocate the other shares' buckets, in `pinned` memory if gradients are on a GPU.

        `share`: this rank's, which `inner` reduces.
        """
        self.layout = merged.layout
        self.repairs = inner.repairs
        self._inner_buckets = [index for index, owner in enumerate(merged.owners) if owner == share]
        inner_tensors = dict(zip(self._inner_buckets, inner.tensors, strict=True))
        host = torch.device("cpu")
        self.tensors = [
            inner_tensors[index] if index in inner_tensors else zero_bucket(bucket, host, pinned=pinned)
            for index, bucket in enumerate(merged.layout.buckets)
        ]
        self._inner_index = {index: number for number, index in enumerate(self._inner_buckets)}
        self._buckets = [
            OwnedBucket(bucket.elements, bucket.itemsize, 0, owner)
            for bucket, owner in zip(merged.layout.schedule, merged.owners, strict=True)
        ]
        self._inner, self._rings = inner, rings
        self._lock = threading.Lock()
        self._error: RingError | None = None
        self._given_up = False
        self._broadcasts: InOrder
        """Broadcasts or receives each bucket as soon as all before it are."""
        self._on_error: Callable[[RingError], None]
        self._inward: RingEngine
        self._outward: RingEngine
        self._watch: NextWatch

    def staging(self, device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
        """Return what copies gradients between this device and host memory."""
        return self._inner.staging(device, on_error)

    def open(self, on_done: Callable[[int], None], on_error: Callable[[RingError], None]) -> None:
        """Start the threads."""
        self._on_error = on_error
        self._outward = self._engine(self._rings.outward, broadcast_steps, on_done)
        self._broadcasts = InOrder(len(self._buckets), self._outward.submit)
        self._inner.open(lambda number: self._broadcasts.add(self._inner_buckets[number]), self._fail)
        self._inward = self._engine(self._rings.inward, reduce_steps, self._summed)
        self._watch = NextWatch(self._rings.inward, self._fail)

    def submit(self, index: int) -> None:
        """Reduce the next bucket. Raise `RingError` after an error."""
        if self._error is not None:
            raise self._error
        self._inward.submit(index)

    def ends(self) -> dict[tuple[int, int], int]:
        """Return each stream's number of tagged bytes."""
        return self._inner.ends()

    def is_acknowledged(self, ends: Ends) -> bool:
        """Return whether the ranks that they go to have acknowledged all bytes up to these ends."""
        return self._inner.is_acknowledged(ends)

    def give_up(self) -> None:
        """Note that the script ends by an error."""
        self._given_up = True

    def close(self) -> None:
        """End the threads. A bucket in progress fails and breaks all rings."""
        self._inward.close()
        self._inner.close()
        self._outward.close()
        self._watch.close(well=self._error is None and not self._given_up)

    def _engine(
        self,
        ring: Ring,
        steps_of: Callable[[OwnedBucket, Position, int], RingSteps],
        on_done: Callable[[int], None],
    ) -> RingEngine:
        engine = RingEngine(ring, self._buckets, steps_of, SLICE_BYTES, on_done, self._fail, divisor=1)
        engine.bind(self.tensors)
        return engine

    def _summed(self, index: int) -> None:
        """Go on with a bucket whose sum the owner has, in a thread of the first ring."""
        number = self._inner_index.get(index)
        if number is None:
            self._broadcasts.add(index)
        else:
            self._inner.submit(number)

    def _fail(self, error: RingError) -> None:
        """Report the first error, and have the ranks of this host and of the DP group fail, too."""
        with self._lock:
            is_first = self._error is None
            self._error = self._error or error
        if is_first:
            self._rings.abort()
            self._inner.abort()
            self._on_error(error)
