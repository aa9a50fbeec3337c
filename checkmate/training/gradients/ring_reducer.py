"""Reduces the layout's buckets over the tagging ring, or the tagging trees, in host memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from checkmate.ring.connections import Ring
from checkmate.ring.engine import Engine, RingEngine
from checkmate.ring.place import RingError
from checkmate.ring.steps import SLICE_BYTES, allreduce_steps
from checkmate.tagger import TaggedSocket
from checkmate.training.gradients.reducer import Ends, InOrder, zero_buckets
from checkmate.training.gradients.repairs import Repairs
from checkmate.training.gradients.staging import Staging, staging_for
from checkmate.tree.connections import Tree
from checkmate.tree.engine import TreeEngine
from checkmate.wire.layout import Layout
from checkmate.wire.schedule import side_of
from checkmate.wire.tree import TreeSlicing

SWITCH_SECONDS: Final = 0.0005
"""Python's switch interval while a reducer is open. After each slice a thread of the ring waits this long
for a main thread that computes in Python; the default of 5 ms is longer than most slices take.
"""


class RingReducer:
    """Reduces in host memory, over the tagging ring, and small buckets over the trees, if there are any.

    Its creator closes the connections. While it is open the process has a shorter switch interval
    (`sys.setswitchinterval`).
    """

    def __init__(
        self,
        ring: Ring,
        layout: Layout,
        tree: Tree | None = None,
        *,
        first_id: int = 0,
        pinned: bool = False,
        divisor: int | None = None,
        repairs: Repairs | None = None,
    ) -> None:
        """Allocate buckets, in `pinned` memory if gradients are on a GPU.

        `tree`: for a layout with trees. `first_id`: shard 0's in tags. `divisor`: of sums; the number of
        ranks by default. `repairs`: keeps what is tagged, if copies may be lost.
        """
        self.repairs: Final = repairs
        self.layout = layout
        self.tensors: Sequence[torch.Tensor] = zero_buckets(layout, torch.device("cpu"), pinned=pinned)
        self._ring, self._tree = ring, tree
        self._divisor = divisor or ring.place.ranks
        self._schedule = [
            replace(bucket, shadow_id=first_id + bucket.shadow_id) for bucket in layout.schedule
        ]
        # The sender and the shadow id of each stream that this rank tags, by channel and shard.
        self._streams: dict[tuple[int, int], tuple[TaggedSocket, int]] = {}
        if side_of(ring.place.ranks, ring.place.rank) is not None:
            shards = sorted({bucket.shadow_id for bucket in layout.schedule})
            roots = [] if tree is None else [tree.root(channel) for channel in range(tree.place.channels)]
            for channel, sender in enumerate((*ring.senders, *roots)):
                if isinstance(sender, TaggedSocket):
                    self._streams |= {(channel, shard): (sender, first_id + shard) for shard in shards}
        self._engines: list[Engine] = []
        self._places: dict[int, tuple[Engine, int]] = {}  # by bucket: its engine, and its index there
        self._lock = threading.Lock()
        self._has_failed = False
        self._reports: InOrder
        self._on_error: Callable[[RingError], None]
        self._interval: float

    def staging(self, device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
        """Return what copies gradients between this device and host memory."""
        return staging_for(device, on_error)

    def open(self, on_done: Callable[[int], None], on_error: Callable[[RingError], None]) -> None:
        """Start the threads."""
        self._on_error = on_error
        # Ring and trees have each an order of their own.
        self._reports = InOrder(len(self._schedule), on_done)
        slicing = self.layout.slicing
        small = [isinstance(slicing, TreeSlicing) and slicing.by_tree(bucket) for bucket in self._schedule]
        try:
            for over_trees in (False, True):
                if numbers := [number for number, is_small in enumerate(small) if is_small == over_trees]:
                    self._start(numbers, over_trees=over_trees)
        except BaseException:
            for engine in self._engines:
                engine.close()
            raise
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._interval))

    def _start(self, numbers: Sequence[int], *, over_trees: bool) -> None:
        """Start the engine of these buckets."""
        buckets = [self._schedule[number] for number in numbers]

        def report(index: int) -> None:
            self._reports.add(numbers[index])

        engine: Engine
        if over_trees:
            assert self._tree is not None
            engine = TreeEngine(self._tree, buckets, report, self._fail, divisor=self._divisor)
        else:
            engine = RingEngine(
                *(self._ring, buckets, allreduce_steps, SLICE_BYTES, report, self._fail),
                divisor=self._divisor,
            )
        self._engines.append(engine)
        self._places |= {number: (engine, index) for index, number in enumerate(numbers)}
        on_tagged = None if self.repairs is None else self.repairs.keep
        engine.bind([self.tensors[number] for number in numbers], on_tagged)

    def submit(self, index: int) -> None:
        """Reduce the next bucket. Raise `RingError` if a connection is broken."""
        if index == 0 and self._ring.tagger is not None:
            self._ring.tagger.warn_of_faults(self._ring.place.own_name)
        engine, number = self._places[index]
        engine.submit(number)

    def _fail(self, error: RingError) -> None:
        """Report the first error of ring and trees, and break both."""
        with self._lock:
            is_first, self._has_failed = not self._has_failed, True
        if is_first:
            self.abort()
            self._on_error(error)

    def ends(self) -> dict[tuple[int, int], int]:
        """Return each stream's number of tagged bytes in this incarnation."""
        return {stream: sender.position(number) for stream, (sender, number) in self._streams.items()}

    def is_acknowledged(self, ends: Ends) -> bool:
        """Return whether the ranks that they go to have acknowledged all bytes up to these ends."""
        for stream, end in ends.items():
            sender, number = self._streams[stream]
            if sender.acknowledged(number) < end:
                return False
        return True

    def abort(self) -> None:
        """Break all connections, so that the other ranks learn of an error here."""
        self._ring.abort()
        if self._tree is not None:
            self._tree.abort()

    def give_up(self) -> None:
        """Do nothing: there are no other ranks of this host."""

    def close(self) -> None:
        """End the threads. A bucket in progress fails and breaks the ring."""
        for engine in self._engines:
            engine.close()
        if abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6:  # unless someone else has changed it
            sys.setswitchinterval(self._interval)
