"""AllGather of buckets over one ring, again and again: what the labs' ranks run; or another collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from checkmate.ring.connections import Ring, RingError
from checkmate.ring.engine import Engine, OnTagged, Watermark
from checkmate.ring.steps import SLICE_BYTES, Position, RingSteps, allgather_steps
from checkmate.wire.schedule import Bucket


class AllGather:
    """Gathers the same buckets again and again over one ring. A context manager: `close` ends its threads."""

    def __init__(
        self,
        ring: Ring,
        buckets: Sequence[Bucket],
        slice_bytes: int = SLICE_BYTES,
        steps_of: Callable[[Bucket, Position, int], RingSteps] = allgather_steps,
    ) -> None:
        """`steps_of` `allreduce_steps` makes an AllReduce of it: buckets are summed and averaged first."""
        self._buckets = buckets
        self._gathered = Watermark()
        self._error: RingError | None = None
        self._engine = Engine(
            ring, buckets, steps_of, slice_bytes, lambda _: self._gathered.advance(), self._fail
        )

    def run(self, tensors: Sequence[torch.Tensor], on_tagged: OnTagged | None = None) -> None:
        """Gather: rank i brings chunk (i + 1) mod n of each channel, and leaves with all of them.

        `tensors` are flat, contiguous CPU tensors, one for each bucket. When it returns, all is received and
        all is with the kernel, so they may be overwritten. After a `RingError` the ring is broken for good.
        """
        self._engine.bind(tensors, on_tagged)
        gathered = self._gathered.value + len(self._buckets)
        try:
            for index in range(len(self._buckets)):
                self._engine.submit(index)
            if not self._gathered.wait_for(gathered):
                raise self._error or RingError("the AllGather is closed")
        except BaseException:  # Ctrl-C too: the threads have to let go of the tensors
            self.close()
            raise

    def close(self) -> None:
        """End the threads."""
        self._engine.close()
        self._gathered.end()

    def __enter__(self) -> AllGather:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fail(self, error: RingError) -> None:
        self._error = error
        self._gathered.end()
