"""Moves an AllGather's bytes: for each channel one thread that sends and one that receives.

One thread with blocking sockets would deadlock as soon as a chunk is larger than both socket buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType

import torch

from checkmate.ring.connections import Ring, RingError, receive_into
from checkmate.ring.steps import Position, Receive, Send, allgather_steps
from checkmate.schedule import Bucket

SLICE_BYTES = 1 << 20
"""A multiple of every element's size."""

OnTagged = Callable[[int, int, memoryview], None]
"""Called with (channel, shadow id, bytes) right before they are sent tagged, on the channel's own thread."""


class AllGather:
    """Gathers the same buckets again and again over one ring. A context manager: `close` ends its threads."""

    def __init__(self, ring: Ring, buckets: Sequence[Bucket], slice_bytes: int = SLICE_BYTES) -> None:
        place = ring.place
        self._ring = ring
        self._buckets = buckets
        self._steps = [
            allgather_steps(buckets, Position(place.rank, place.ranks, channel, place.channels), slice_bytes)
            for channel in range(place.channels)
        ]
        self._threads = ThreadPoolExecutor(2 * place.channels, thread_name_prefix="ring")

    def run(self, tensors: Sequence[torch.Tensor], on_tagged: OnTagged | None = None) -> None:
        """Gather: rank i brings chunk (i + 1) mod n of each channel, and leaves with all of them.

        `tensors` are flat, contiguous CPU tensors, one for each bucket. When it returns, all is received and
        all is with the kernel, so they may be overwritten. After a `RingError` the ring is broken for good.
        """
        views = [byte_view(tensor) for tensor in tensors]
        lengths = [len(view) for view in views]
        if lengths != [bucket.nbytes for bucket in self._buckets]:
            raise ValueError(f"tensors of {lengths} bytes don't match the buckets")
        jobs: list[Future[None]] = []
        for channel, (sends, receives) in enumerate(self._steps):
            progress = _Progress()
            jobs.append(self._threads.submit(self._receive, channel, receives, views, progress))
            jobs.append(self._threads.submit(self._send, channel, sends, views, progress, on_tagged))
        try:
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            error = next((job.exception() for job in done if job.exception()), None)
            if error is not None:
                raise error
        except BaseException:  # Ctrl-C too: the threads have to let go of the tensors
            self._ring.abort()  # they wake with errors of their own, which only repeat the first
            wait(jobs)
            raise

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def __enter__(self) -> AllGather:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _send(
        self,
        channel: int,
        steps: Sequence[Send],
        views: Sequence[memoryview],
        progress: _Progress,
        on_tagged: OnTagged | None,
    ) -> None:
        sender = self._ring.senders[channel]
        try:
            for step in steps:
                progress.wait_for(step.after)
                if step.chunk:
                    sender.begin_chunk(step.chunk, step.shadow_id)
                piece = views[step.bucket][step.start : step.stop]
                if on_tagged is not None and step.shadow_id is not None:
                    on_tagged(channel, step.shadow_id, piece)
                sender.write(piece)
        except OSError as error:
            raise self._broken(channel, "to", 1, error) from error

    def _receive(
        self, channel: int, steps: Sequence[Receive], views: Sequence[memoryview], progress: _Progress
    ) -> None:
        receive = self._ring.receivers[channel].recv_into
        try:
            for step in steps:
                receive_into(receive, views[step.bucket][step.start : step.stop])
                progress.advance()
        except OSError as error:
            broken = self._broken(channel, "from", -1, error)
            progress.fail(broken)
            raise broken from error

    def _broken(self, channel: int, way: str, offset: int, error: OSError) -> RingError:
        place = self._ring.place
        peer = (place.rank + offset) % place.ranks
        return RingError(
            f"rank {place.rank}, channel {channel}, {way} rank {peer}: {error.strerror or error}"
        )


class _Progress:
    """How many receives of a channel are done; its sender waits for those that it passes on."""

    def __init__(self) -> None:
        self._done = 0
        self._error: RingError | None = None
        self._changed = threading.Condition()

    def advance(self) -> None:
        with self._changed:
            self._done += 1
            self._changed.notify()

    def fail(self, error: RingError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify()

    def wait_for(self, count: int) -> None:
        if self._done >= count:  # without the lock: it only grows
            return
        with self._changed:
            while self._done < count:
                if self._error is not None:
                    raise self._error
                self._changed.wait()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A flat, contiguous CPU tensor's bytes, in place; `ValueError` for others."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"not a flat, contiguous CPU tensor: {tuple(tensor.shape)} on {tensor.device}")
    return tensor.detach().view(torch.uint8).numpy().data
