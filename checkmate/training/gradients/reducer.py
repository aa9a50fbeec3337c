"""The interface of what reduces gradients over the ranks, behind which `protect` works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from checkmate.ring.place import RingError
from checkmate.state import DTYPES
from checkmate.training.gradients.repairs import Repairs
from checkmate.training.gradients.staging import Staging
from checkmate.wire.layout import BucketLayout, Layout

Ends = Mapping[tuple[int, int], int]
"""The number of tagged bytes of each stream, by channel and shard."""


class Reducer(Protocol):
    """Averages or sums a layout's buckets over all replicas, in order of index, each once per iteration."""

    @property
    def repairs(self) -> Repairs | None:
        """What sends lost copies again; `None` if the job's network loses none."""

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
                staging's `copy_out`, and the bucket be filled again after that.
            on_error: Called at most once, from any thread, if no more buckets can be reduced.
        """

    def submit(self, index: int) -> None:
        """Reduce the next bucket, which has this rank's gradients. Raise `RingError` after an error."""

    def ends(self) -> dict[tuple[int, int], int]:
        """Return the end of each stream that this rank tags, after all buckets that are done.

        It is empty unless this rank tags, and exact only while no bucket is in progress.
        """

    def is_acknowledged(self, ends: Ends) -> bool:
        """Return whether other ranks have acknowledged all bytes up to these ends, as `ends` returned."""

    def give_up(self) -> None:
        """Note that the script ends by an error, of which other ranks of this host are told at `close`."""

    def close(self) -> None:
        """End. Buckets in progress are lost."""


class InOrder:
    """Passes numbers on in their order, 0 to `count` - 1 again and again, whichever comes first."""

    def __init__(self, count: int, act: Callable[[int], None]) -> None:
        """Begin with number 0. `act` is called with each number, by one thread of several at a time."""
        self._count, self._act = count, act
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        self._next = 0

    def add(self, number: int) -> None:
        """Pass on this number, and those that have waited for it, once all before it are."""
        with self._lock:
            self._waiting.add(number)
            while self._next in self._waiting:
                self._waiting.remove(self._next)
                self._act(self._next)
                self._next = (self._next + 1) % self._count


def zero_buckets(layout: Layout, device: torch.device, *, pinned: bool = False) -> list[torch.Tensor]:
    """Return a flat tensor of zeros for each bucket of a layout."""
    return [zero_bucket(bucket, device, pinned=pinned) for bucket in layout.buckets]


def zero_bucket(bucket: BucketLayout, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Return a flat tensor of zeros for a bucket."""
    return torch.zeros(bucket.elements, dtype=DTYPES[bucket.dtype], device=device, pin_memory=pinned)
