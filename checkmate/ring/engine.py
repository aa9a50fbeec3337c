"""Reduces buckets over connections of ranks: what all collectives have in common, and the ring's.

In the ring each channel has one thread to send, and one to receive and reduce. A single thread with blocking
sockets would deadlock when a chunk is larger than both socket buffers.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from checkmate.base.wording import counted
from checkmate.ring.connections import Connections, Ring, receive_into
from checkmate.ring.place import RingError
from checkmate.ring.steps import Arrival, Position, RingSteps
from checkmate.wire.schedule import Bucket

SomeBucket = TypeVar("SomeBucket", bound=Bucket)

OnTagged = Callable[[int, int, memoryview], None]
"""Called with (channel, shadow id, bytes) before tagged bytes are sent, in the channel's own thread."""


class Worker(NamedTuple):
    """The work of one of an engine's threads."""

    name: str
    work: Callable[[int], None]
    channel: int


class Engine(ABC):
    """Reduces the same buckets repeatedly, in order of index.

    `on_done(index)` is called when all of a bucket is received, and all that has to be sent is passed to the
    kernel, so that the bucket may be overwritten. `on_error(error)` is called at most once, if the ring
    breaks for good. The engine's threads wait for both to return. Sums are divided by `divisor`.
    """

    def __init__(
        self,
        connections: Connections,
        buckets: Sequence[Bucket],
        on_done: Callable[[int], None],
        on_error: Callable[[RingError], None],
        *,
        divisor: int,
    ) -> None:
        self._connections = connections
        self._buckets = buckets
        self._on_done = on_done
        self._on_error = on_error
        self._on_tagged: OnTagged | None = None
        self._divisor = divisor
        self._tensors: Sequence[torch.Tensor] = ()
        self._views: list[memoryview] = []
        self._lock = threading.Lock()
        self._error: RingError | None = None
        self._finished = 0
        self._at_work = 0
        self._busy_threads: list[int] = []  # threads still at work on the bucket
        self._submitted = Watermark()
        self._threads: list[threading.Thread] = []

    def bind(self, tensors: Sequence[torch.Tensor], on_tagged: OnTagged | None = None) -> None:
        """Work on these tensors (flat, contiguous, on the CPU) from now on. No bucket may be in progress."""
        views = [byte_view(tensor) for tensor in tensors]
        sizes = [(tensor.numel(), tensor.element_size()) for tensor in tensors]
        if sizes != [(bucket.elements, bucket.itemsize) for bucket in self._buckets]:
            raise ValueError(f"tensors of {sizes} (elements, bytes each) don't match the buckets")
        self._tensors, self._views, self._on_tagged = tensors, views, on_tagged
        if not self._threads:
            self._start()

    def submit(self, index: int) -> None:
        """Start work on the next bucket, which must be bucket `index`.

        Raises:
            RingError: The ring is broken.
            ValueError: It is not the next bucket, or is still in progress.
        """
        if self._error is not None:
            raise self._error
        expected = self._submitted.value % len(self._buckets)
        if index != expected:
            raise ValueError(f"bucket {index} submitted, but bucket {expected} is next")
        if self._submitted.value - self._finished == len(self._buckets):
            raise ValueError(f"bucket {index} submitted again before it was done")
        self._submitted.advance()

    def close(self) -> None:
        """End the threads. If buckets are in progress, this breaks the connections."""
        with self._lock:
            unfinished = self._submitted.value - self._finished
        closed = f"{self._connections.place.own_name}: closed"
        if unfinished:
            self._fail(RingError(f"{closed} with {counted(unfinished, 'bucket')} in progress"))
        self._error = self._error or RingError(closed)
        self._end()
        for thread in self._threads:
            thread.join()

    @abstractmethod
    def _workers(self) -> Iterator[Worker]:
        """Yield the work of each thread, which ends once `_submitted` has ended."""

    def _start(self) -> None:
        for worker in self._workers():
            # A daemon, so that a script can end without `close`.
            self._threads.append(
                threading.Thread(target=self._run, args=(worker,), name=worker.name, daemon=True)
            )
        self._at_work = len(self._threads)
        self._busy_threads = [self._at_work] * len(self._buckets)
        for thread in self._threads:
            thread.start()

    def _run(self, worker: Worker) -> None:
        try:
            worker.work(worker.channel)
        except RingError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - otherwise others would wait for this thread for ever
            place = f"{self._connections.place.own_name}, channel {worker.channel}"
            broken = RingError(f"{place}: {type(error).__name__}: {error}")
            broken.__cause__ = error
            self._fail(broken)

    def _reduce(
        self, tensor: torch.Tensor, scratch: torch.Tensor, start: int, stop: int, arrival: Arrival
    ) -> None:
        size = tensor.element_size()
        sum_ = tensor[start // size : stop // size]
        sum_.add_(scratch[: stop - start].view(tensor.dtype))
        if arrival is Arrival.AVERAGE and self._divisor != 1:
            sum_.div_(self._divisor)

    def _finish(self, index: int) -> None:
        """Note that a thread has finished a bucket; the last one calls `on_done`.

        It continues with the next bucket only then, so buckets finish in order.
        """
        with self._lock:
            self._busy_threads[index] -= 1
            if self._busy_threads[index] or self._error is not None:
                return
            self._busy_threads[index] = self._at_work
            self._finished += 1
        self._on_done(index)

    def _fail(self, error: RingError) -> None:
        with self._lock:
            is_first = self._error is None
            if is_first:
                self._error = error
        if is_first:
            self._connections.abort()  # wakes blocked threads, here and at the other ranks
            self._end()
            self._on_error(error)

    def _end(self) -> None:
        self._submitted.end()

    def _broken(self, channel: int, way: str, peer: int, error: OSError) -> RingError:
        place = self._connections.place
        subject = f"{place.own_name}, channel {channel}, {way} {place.name(peer)}"
        return RingError(f"{subject}: {error.strerror or error}")


class RingEngine(Engine):
    """Executes the steps of buckets around a ring."""

    def __init__(
        self,
        ring: Ring,
        buckets: Sequence[SomeBucket],
        steps_of: Callable[[SomeBucket, Position, int], RingSteps],
        slice_bytes: int,
        on_done: Callable[[int], None],
        on_error: Callable[[RingError], None],
        *,
        divisor: int,
    ) -> None:
        super().__init__(ring, buckets, on_done, on_error, divisor=divisor)
        place = ring.place
        channels = range(place.channels)
        self._slice_bytes = slice_bytes
        self._steps = [
            [
                steps_of(bucket, Position(place.rank, place.ranks, channel, place.channels), slice_bytes)
                for bucket in buckets
            ]
            for channel in channels
        ]
        self._chunks = [
            [(step.chunk, step.shadow_id) for steps in by_bucket for step in steps.sends if step.chunk]
            for by_bucket in self._steps
        ]
        self._arrivals = [Watermark() for _ in channels]

    def _workers(self) -> Iterator[Worker]:
        for channel in range(self._connections.place.channels):
            yield Worker(f"ring send {channel}", self._send, channel)
            yield Worker(f"ring receive {channel}", self._receive, channel)

    def _send(self, channel: int) -> None:
        sender = self._connections.senders[channel]
        arrivals = self._arrivals[channel]
        before = 0  # receives of earlier buckets
        for number in itertools.count():
            if not self._submitted.wait_for(number + 1):
                return
            index = number % len(self._buckets)
            steps, view = self._steps[channel][index], self._views[index]
            if index == 0:
                sender.plan(self._chunks[channel])
            for step in steps.sends:
                if not arrivals.wait_for(before + step.after):
                    return
                piece = view[step.start : step.stop]
                try:
                    if step.chunk:
                        sender.begin_chunk(step.chunk, step.shadow_id)
                    if step.shadow_id is not None and self._on_tagged is not None:
                        self._on_tagged(channel, step.shadow_id, piece)
                    sender.write(piece)
                except OSError as error:
                    place = self._connections.place
                    raise self._broken(channel, "to", (place.rank + 1) % place.ranks, error) from error
            before += len(steps.receives)
            self._finish(index)

    def _receive(self, channel: int) -> None:
        receive = self._connections.receivers[channel].recv_into
        arrivals = self._arrivals[channel]
        scratch = torch.empty(self._slice_bytes, dtype=torch.uint8)
        scratch_view = byte_view(scratch)
        for number in itertools.count():
            if not self._submitted.wait_for(number + 1):
                return
            index = number % len(self._buckets)
            view, reduce = self._views[index], partial(self._reduce, self._tensors[index], scratch)
            for step in self._steps[channel][index].receives:
                try:
                    if step.arrival is Arrival.KEEP:
                        receive_into(receive, view[step.start : step.stop])
                    else:
                        receive_into(receive, scratch_view[: step.stop - step.start])
                except OSError as error:
                    previous = self._connections.place.previous
                    raise self._broken(channel, "from", previous, error) from error
                if step.arrival is not Arrival.KEEP:
                    reduce(step.start, step.stop, step.arrival)
                arrivals.advance()
            self._finish(index)

    def _end(self) -> None:
        super()._end()
        for arrivals in self._arrivals:
            arrivals.end()


class Watermark:
    """A number that only grows, and threads that wait for it."""

    def __init__(self) -> None:
        self.value = 0
        self.has_ended = False
        self._growth = threading.Condition()

    def advance(self) -> None:
        """Add 1."""
        with self._growth:
            self.value += 1
            self._growth.notify_all()

    def end(self) -> None:
        """Wake all waiting threads: the number does not grow any more."""
        with self._growth:
            self.has_ended = True
            self._growth.notify_all()

    def wait_for(self, value: int) -> bool:
        """Wait until it is at least `value`. Return false if it has ended before."""
        if self.value >= value:  # without the lock: it only grows
            return True
        with self._growth:
            self._growth.wait_for(lambda: self.has_ended or self.value >= value)
            return self.value >= value


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a flat, contiguous CPU tensor; raise `ValueError` for others."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"not a flat, contiguous CPU tensor: {tuple(tensor.shape)} on {tensor.device}")
    return tensor.detach().view(torch.uint8).numpy().data
