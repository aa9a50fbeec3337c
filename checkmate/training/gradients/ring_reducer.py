"""Reduces the layout's buckets over the tagging ring, in host memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from checkmate.ring.connections import Ring
from checkmate.ring.engine import Engine
from checkmate.ring.place import RingError
from checkmate.ring.steps import SLICE_BYTES, allreduce_steps
from checkmate.tagger import TaggedSocket
from checkmate.training.gradients.reducer import Ends, zero_buckets
from checkmate.training.gradients.repairs import Repairs
from checkmate.training.gradients.staging import Staging, staging_for
from checkmate.wire.layout import Layout
from checkmate.wire.schedule import side_of

SWITCH_SECONDS: Final = 0.0005
"""Python's switch interval while a reducer is open. After each slice a thread of the ring waits this long
for a main thread that computes in Python; the default of 5 ms is longer than most slices take.
"""


class RingReducer:
    """Reduces in host memory, over the tagging ring, which its creator closes.

    While it is open the process has a shorter switch interval (`sys.setswitchinterval`).
    """

    def __init__(
        self,
        ring: Ring,
        layout: Layout,
        *,
        first_id: int = 0,
        pinned: bool = False,
        divisor: int | None = None,
        repairs: Repairs | None = None,
    ) -> None:
        """Allocate buckets, in `pinned` memory if gradients are on a GPU.

        `first_id`: shard 0's in tags. `divisor`: of sums; the number of ranks by default. `repairs`: keeps
        what is tagged, if copies may be lost.
        """
        self.repairs: Final = repairs
        self.layout = layout
        self.tensors: Sequence[torch.Tensor] = zero_buckets(layout, torch.device("cpu"), pinned=pinned)
        self._ring = ring
        self._divisor = divisor or ring.place.ranks
        self._schedule = [
            replace(bucket, shadow_id=first_id + bucket.shadow_id) for bucket in layout.schedule
        ]
        # The sender and the shadow id of each stream that this rank tags, by channel and shard.
        self._streams: dict[tuple[int, int], tuple[TaggedSocket, int]] = {}
        if side_of(ring.place.ranks, ring.place.rank) is not None:
            shards = sorted({bucket.shadow_id for bucket in layout.schedule})
            for channel, sender in enumerate(ring.senders):
                if isinstance(sender, TaggedSocket):
                    self._streams |= {(channel, shard): (sender, first_id + shard) for shard in shards}
        self._engine: Engine
        self._interval: float

    def staging(self, device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
        """Return what copies gradients between this device and host memory."""
        return staging_for(device, on_error)

    def open(self, on_done: Callable[[int], None], on_error: Callable[[RingError], None]) -> None:
        """Start the ring's threads."""
        self._engine = Engine(
            self._ring,
            self._schedule,
            allreduce_steps,
            SLICE_BYTES,
            on_done,
            on_error,
            divisor=self._divisor,
        )
        self._engine.bind(self.tensors, None if self.repairs is None else self.repairs.keep)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._interval))

    def submit(self, index: int) -> None:
        """Reduce the next bucket. Raise `RingError` if the ring is broken."""
        if index == 0 and self._ring.tagger is not None:
            self._ring.tagger.warn_of_faults(self._ring.place.own_name)
        self._engine.submit(index)

    def ends(self) -> dict[tuple[int, int], int]:
        """Return each stream's number of tagged bytes in this incarnation."""
        return {stream: sender.position(number) for stream, (sender, number) in self._streams.items()}

    def is_acknowledged(self, ends: Ends) -> bool:
        """Return whether the next rank has acknowledged all bytes up to these ends."""
        for stream, end in ends.items():
            sender, number = self._streams[stream]
            if sender.acknowledged(number) < end:
                return False
        return True

    def abort(self) -> None:
        """Break the ring, so that the other ranks learn of an error here."""
        self._ring.abort()

    def give_up(self) -> None:
        """Do nothing: there are no other ranks of this host."""

    def close(self) -> None:
        """End the threads. A bucket in progress fails and breaks the ring."""
        self._engine.close()
        if abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6:  # unless someone else has changed it
            sys.setswitchinterval(self._interval)
