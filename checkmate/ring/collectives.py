"""Repeated collectives, with blocking calls, for labs; training uses the engines themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from checkmate.ring.connections import Ring
from checkmate.ring.engine import Engine, OnTagged, RingEngine, Watermark
from checkmate.ring.place import RingError
from checkmate.ring.steps import SLICE_BYTES, Position, RingSteps, allgather_steps
from checkmate.wire.schedule import Bucket

EngineMaker = Callable[[Callable[[int], None], Callable[[RingError], None]], Engine]
"""Returns an engine that calls these when a bucket is done, and when its connections are broken."""


class Collective(AbstractContextManager["Collective"]):
    """Runs an engine's collective repeatedly, on all of its buckets. It is a context manager."""

    def __init__(self, buckets: int, engine_of: EngineMaker) -> None:
        """Start the threads of an engine that has this number of buckets."""
        self._buckets = buckets
        self._gathered = Watermark()
        self._error: RingError | None = None
        self._engine = engine_of(lambda _: self._gathered.advance(), self._fail)

    def run(self, tensors: Sequence[torch.Tensor], on_tagged: OnTagged | None = None) -> None:
        """Run it once.

        When it returns, everything is received and passed to the kernel, so `tensors` may be overwritten.

        Args:
            tensors: Flat, contiguous CPU tensors, one per bucket.
            on_tagged: Called before tagged bytes are sent.

        Raises:
            RingError: The ring is broken, for good.
        """
        self._engine.bind(tensors, on_tagged)
        gathered = self._gathered.value + self._buckets
        try:
            for index in range(self._buckets):
                self._engine.submit(index)
            if not self._gathered.wait_for(gathered):
                raise self._error or RingError("the collective is closed")
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


class AllGather(Collective):
    """Gathers the same buckets repeatedly over one ring: rank i contributes chunk (i + 1) mod n."""

    def __init__(
        self,
        ring: Ring,
        buckets: Sequence[Bucket],
        slice_bytes: int = SLICE_BYTES,
        steps_of: Callable[[Bucket, Position, int], RingSteps] = allgather_steps,
    ) -> None:
        """Start the threads. With `allreduce_steps` as `steps_of` it is an AllReduce."""
        super().__init__(
            len(buckets),
            lambda on_done, on_error: RingEngine(
                *(ring, buckets, steps_of, slice_bytes, on_done, on_error), divisor=ring.place.ranks
            ),
        )
