"""Buckets of received gradients: two sets per shard, so that one fills while the other is stepped.

Iteration t uses set t % 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from checkmate import state
from checkmate.wire.layout import Layout

SETS = 2


class BucketSets:
    """Two sets of a shard's buckets, as flat tensors.

    `released` is the newest iteration whose gradients are no longer needed. `released + SETS` is the newest
    iteration that may be written.
    """

    def __init__(self, layout: Layout, shard: int, released: int) -> None:
        ours = {i: bucket for i, bucket in enumerate(layout.buckets) if bucket.shard == shard}
        self.tensors: list[dict[int, torch.Tensor]] = [
            {i: torch.zeros(b.elements, dtype=getattr(torch, b.dtype)) for i, b in ours.items()}
            for _ in range(SETS)
        ]
        self._bytes = [{i: state.bytes_of(t) for i, t in tensors.items()} for tensors in self.tensors]
        self.released = released

    def gradients(self, iteration: int) -> Mapping[int, torch.Tensor]:
        """Return an iteration's gradients, as flat tensors by index of bucket."""
        return self.tensors[iteration % SETS]

    def free_for(self, iteration: int) -> bool:
        """Return whether an iteration's bytes may be written."""
        return iteration <= self.released + SETS

    def room(self, iteration: int, bucket: int, start: int, stop: int) -> memoryview:
        """Return writable bytes [start, stop) of a bucket."""
        return self._bytes[iteration % SETS][bucket][start:stop]
