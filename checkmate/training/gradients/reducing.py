"""What reduces gradients over the ranks: the interface behind which `protect` works, and our ring's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from checkmate.ring.collectives import AllReduce
from checkmate.ring.connections import Ring
from checkmate.ring.place import RingError
from checkmate.state import DTYPES
from checkmate.training.gradients.staging import Staging, staging_for
from checkmate.wire.layout import BucketLayout, Layout

Ends = Mapping[tuple[int, int], int]
"""The number of tagged bytes of each stream, by channel and shard."""


class Reducer(Protocol):
    """Averages or sums a layout's buckets over all replicas, in order of index, each once per iteration."""

    @property
    def layout(self) -> Layout:
        """The layout: of the whole model, if several DP groups train it."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """One flat tensor per bucket, which gradients are copied into, and in which their average is."""

    def staging(self, device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
        """Return what copies gradients between this device and `tensors`."""

    def open(self, on_done: Callable[[int], None], on_error: Callable[[RingError], None]) -> None:
        """Begin.

        Args:
            on_done: Called with a bucket's index, in order, when its average may be copied back by the
                staging's `give`, and the bucket be filled again after that.
            on_error: Called at most once, from any thread, if no more buckets can be reduced.
        """

    def submit(self, index: int) -> None:
        """Reduce the next bucket, which has this rank's gradients. Raise `RingError` after an error."""

    def ends(self) -> dict[tuple[int, int], int]:
        """Return the end of each stream that this rank tags, after all buckets that are done."""

    def passed(self, ends: Ends) -> bool:
        """Return whether the next rank has acknowledged all bytes up to these ends."""

    def give_up(self) -> None:
        """Note that the script ends by an error, of which other ranks of this host are told at `close`."""

    def close(self) -> None:
        """End. Buckets in progress are lost."""


def zero_buckets(layout: Layout, device: torch.device, *, pinned: bool = False) -> list[torch.Tensor]:
    """Return a flat tensor of zeros for each bucket of a layout."""
    return [zero_bucket(bucket, device, pinned=pinned) for bucket in layout.buckets]


def zero_bucket(bucket: BucketLayout, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Return a flat tensor of zeros for a bucket."""
    return torch.zeros(bucket.elements, dtype=DTYPES[bucket.dtype], device=device, pin_memory=pinned)


class RingReducer:
    """Reduces in host memory, over the tagging ring, which its creator closes."""

    def __init__(
        self,
        ring: Ring,
        layout: Layout,
        *,
        first_id: int = 0,
        pinned: bool = False,
        divisor: int | None = None,
    ) -> None:
        """Allocate buckets, in `pinned` memory if gradients are on a GPU.

        `first_id`: shard 0's in tags. `divisor`: of sums; the number of ranks by default.
        """
        self.layout = layout
        self.tensors: Sequence[torch.Tensor] = zero_buckets(layout, torch.device("cpu"), pinned=pinned)
        self._ring, self._first_id, self._divisor = ring, first_id, divisor
        self._buckets = [replace(one, shadow_id=first_id + one.shadow_id) for one in layout.schedule]
        self._allreduce: AllReduce

    def staging(self, device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
        """Return what copies gradients between this device and host memory."""
        return staging_for(device, on_error)

    def open(self, on_done: Callable[[int], None], on_error: Callable[[RingError], None]) -> None:
        """Start the ring's threads."""
        self._allreduce = AllReduce(
            self._ring, self._buckets, self.tensors, on_done, on_error, divisor=self._divisor
        )

    def submit(self, index: int) -> None:
        """Reduce the next bucket. Raise `RingError` if the ring is broken."""
        if index == 0 and self._ring.tagger is not None:
            self._ring.tagger.warn_of_faults(self._ring.place.own_name)
        self._allreduce.submit(index)

    def ends(self) -> dict[tuple[int, int], int]:
        """Return each stream's number of tagged bytes."""
        tagged = self._allreduce.ends()
        return {(channel, number - self._first_id): end for (channel, number), end in tagged.items()}

    def passed(self, ends: Ends) -> bool:
        """Return whether the next rank has acknowledged all bytes up to these ends."""
        return self._allreduce.passed({(c, shard + self._first_id): end for (c, shard), end in ends.items()})

    def abort(self) -> None:
        """Break the ring, so that the other ranks learn of an error here."""
        self._ring.abort()

    def give_up(self) -> None:
        """Do nothing: there are no other ranks of this host."""

    def close(self) -> None:
        """End the threads. A bucket in progress fails and breaks the ring."""
        self._allreduce.close()
