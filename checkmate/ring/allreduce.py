"""AllReduce of buckets over one ring, in place, again and again; boundary ranks tag what is reduced.

Reduce-scatter, average by each chunk's owner, tagged AllGather (design, section 3). An element's bits depend
on where it stands in its bucket and on the slicing into channels and chunks; on no timing, and no slice size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch

from checkmate.ring.connections import Ring, RingError
from checkmate.ring.engine import Engine
from checkmate.ring.steps import SLICE_BYTES, allreduce_steps
from checkmate.tagger import TaggedSocket
from checkmate.wire.schedule import Bucket, side_of

SWITCH_SECONDS = 0.0005
"""Python's switch interval meanwhile: after each slice a thread of the ring waits so long for a main thread
that computes in Python, and 5 ms, the default, is longer than most slices take.
"""


class AllReduce:
    """Averages the same buckets again and again over one ring. A context manager: `close` ends its threads.

    `tensors`, one a bucket, are flat, contiguous, of a floating type and on the CPU; each is reduced in place
    once an iteration. `on_done(index)`: the bucket is reduced, and all that had to be sent of it is with the
    kernel, so it may be overwritten; called in order of index. `on_error`, at most once: the ring is broken
    for good. Both are called from a thread of the ring's, which waits for them to return. While it is open
    the process has a shorter switch interval (`sys.setswitchinterval`).
    """

    def __init__(
        self,
        ring: Ring,
        buckets: Sequence[Bucket],
        tensors: Sequence[torch.Tensor],
        on_done: Callable[[int], None],
        on_error: Callable[[RingError], None],
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(f"a bucket of {tensor.dtype} can't be averaged")
        place = ring.place
        self._tagged: dict[tuple[int, int], TaggedSocket] = {}  # by channel and shard
        if side_of(place.ranks, place.rank) is not None:
            shards = sorted({bucket.shadow_id for bucket in buckets})
            for channel, sender in enumerate(ring.senders):
                if isinstance(sender, TaggedSocket):
                    self._tagged |= {(channel, shard): sender for shard in shards}
        self._engine = Engine(ring, buckets, allreduce_steps, slice_bytes, on_done, on_error)
        self._engine.bind(tensors)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._interval))

    def submit(self, index: int) -> None:
        """Let bucket `index` go: this rank's gradients are in it. In order of index, each once an iteration.

        `RingError` where the ring is broken.
        """
        self._engine.submit(index)

    def ends(self) -> dict[tuple[int, int], int]:
        """Each stream's tagged bytes so far in this incarnation, by channel and shard; 64 bits.

        Empty unless this rank tags. Exact while no bucket is under way.
        """
        return {(channel, shard): sender.position(shard) for (channel, shard), sender in self._tagged.items()}

    def passed(self, ends: Mapping[tuple[int, int], int]) -> bool:
        """Whether the next rank has acknowledged every byte up to these ends, as `ends` gave them."""
        return all(self._tagged[stream].acknowledged(stream[1]) >= end for stream, end in ends.items())

    def close(self) -> None:
        """End the threads. Buckets that are under way are given up, which breaks the ring."""
        self._engine.close()
        if abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6:  # nobody else has changed it
            sys.setswitchinterval(self._interval)

    def __enter__(self) -> AllReduce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
