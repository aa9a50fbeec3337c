"""Repeated collectives over one ring: AllReduce, in which boundary ranks tag reduced chunks, and AllGather.

AllReduce is reduce-scatter, average by each chunk's owner, tagged AllGather (design, section 3). An element's
bits depend on its place in its bucket and on the division into channels and chunks, but not on timing or the
slice size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from checkmate.ring.connections import Ring
from checkmate.ring.engine import Engine, OnTagged, Watermark
from checkmate.ring.place import RingError
from checkmate.ring.steps import SLICE_BYTES, Position, RingSteps, allgather_steps, allreduce_steps
from checkmate.tagger import TaggedSocket
from checkmate.wire.schedule import Bucket, side_of

SWITCH_SECONDS = 0.0005
"""Python's switch interval while an AllReduce is open. After each slice a thread of the ring waits this long
for a main thread that computes in Python; the default of 5 ms is longer than most slices take.
"""


class AllReduce(AbstractContextManager["AllReduce"]):
    """Averages the same buckets repeatedly over one ring. It is a context manager; `close` ends its threads.

    While it is open the process has a shorter switch interval (`sys.setswitchinterval`).
    """

    def __init__(
        self,
        ring: Ring,
        buckets: Sequence[Bucket],
        tensors: Sequence[torch.Tensor],
        on_done: Callable[[int], None],
        on_error: Callable[[RingError], None],
        slice_bytes: int = SLICE_BYTES,
        *,
        divisor: int | None = None,
    ) -> None:
        """Start the threads.

        Args:
            ring: The connected ring.
            buckets: The buckets of each iteration.
            tensors: One per bucket: flat, contiguous, floating point and on the CPU. Each is reduced in place
                once per iteration.
            on_done: Called with a bucket's index, in order of index, when it is reduced and passed to the
                kernel completely, so that it may be overwritten. A thread of the ring waits for it to return.
            on_error: Called at most once, by a thread of the ring, if the ring breaks for good.
            slice_bytes: The size of the pieces in which chunks are sent and reduced.
            divisor: What sums are divided by: the number of ranks by default, 1 to sum.
        """
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(f"a bucket of {tensor.dtype} can't be averaged")
        place = ring.place
        self._tagged: dict[tuple[int, int], TaggedSocket] = {}  # by channel and shadow id
        if side_of(place.ranks, place.rank) is not None:
            shards = sorted({bucket.shadow_id for bucket in buckets})
            for channel, sender in enumerate(ring.senders):
                if isinstance(sender, TaggedSocket):
                    self._tagged |= {(channel, shard): sender for shard in shards}
        divisor = divisor or place.ranks
        self._engine = Engine(ring, buckets, allreduce_steps, slice_bytes, on_done, on_error, divisor=divisor)
        self._engine.bind(tensors)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._interval))

    def submit(self, index: int) -> None:
        """Reduce bucket `index`, which contains this rank's gradients.

        Buckets must be submitted in order of index, each once per iteration. Raise `RingError` if the ring is
        broken.
        """
        self._engine.submit(index)

    def ends(self) -> dict[tuple[int, int], int]:
        """Return each stream's number of tagged bytes in this incarnation, by channel and shadow id.

        It is empty unless this rank tags, and exact only while no bucket is in progress.
        """
        return {(channel, shard): sender.position(shard) for (channel, shard), sender in self._tagged.items()}

    def passed(self, ends: Mapping[tuple[int, int], int]) -> bool:
        """Return whether the next rank has acknowledged all bytes up to these ends, as returned by `ends`."""
        return all(self._tagged[stream].acknowledged(stream[1]) >= end for stream, end in ends.items())

    def close(self) -> None:
        """End the threads. If buckets are in progress, this breaks the ring."""
        self._engine.close()
        if abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6:  # unless someone else has changed it
            sys.setswitchinterval(self._interval)

    def __exit__(self, *_: object) -> None:
        self.close()


class AllGather(AbstractContextManager["AllGather"]):
    """Gathers the same buckets repeatedly over one ring, or runs another collective. Labs use it.

    It is a context manager; `close` ends threads.
    """

    def __init__(
        self,
        ring: Ring,
        buckets: Sequence[Bucket],
        slice_bytes: int = SLICE_BYTES,
        steps_of: Callable[[Bucket, Position, int], RingSteps] = allgather_steps,
    ) -> None:
        """Start the threads. With `allreduce_steps` as `steps_of` it is an AllReduce."""
        self._buckets = buckets
        self._gathered = Watermark()
        self._error: RingError | None = None
        self._engine = Engine(
            ring,
            buckets,
            steps_of,
            slice_bytes,
            lambda _: self._gathered.advance(),
            self._fail,
            divisor=ring.place.ranks,
        )

    def run(self, tensors: Sequence[torch.Tensor], on_tagged: OnTagged | None = None) -> None:
        """Gather all chunks of each channel; rank i contributes chunk (i + 1) mod n.

        When it returns, everything is received and passed to the kernel, so `tensors` may be overwritten.

        Args:
            tensors: Flat, contiguous CPU tensors, one per bucket.
            on_tagged: Called before tagged bytes are sent.

        Raises:
            RingError: The ring is broken, for good.
        """
        self._engine.bind(tensors, on_tagged)
        gathered = self._gathered.value + len(self._buckets)
        try:
            for index in range(len(self._buckets)):
                self._engine.submit(index)
            if not self._gathered.wait_for(gathered):
                raise self._error or RingError("the AllGather is closed")
        except BaseException:  # including Ctrl-C, because the threads must release the tensors
            self.close()
            raise

    def close(self) -> None:
        """End the threads."""
        self._engine.close()
        self._gathered.end()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, error: RingError) -> None:
        self._error = error
        self._gathered.end()
