"""Moves gradients between their memory, on their device, and our flat buckets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

Tensors = list[torch.Tensor]
FutureBuffer = torch.futures.Future[torch.Tensor]
"""The future of a buffer of gradients, complete when all of them are reduced."""


def staging_for(device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
    """Return the staging for a device. `on_error` is called if a background thread fails."""
    return CudaStaging(device, on_error) if device.type == "cuda" else Staging()


class Staging:
    """Moves gradients of one device: on the CPU, by plain copies in the caller's thread.

    `flats` are the parts of our buckets that belong to `gradients`, in the same order.
    """

    def begin(self) -> None:
        """Prepare for an iteration. Called in backward's thread."""

    def copy_in(self, gradients: Tensors, flats: Tensors, ready: Callable[[], None]) -> None:
        """Copy gradients into our buckets, and call `ready` afterwards, in any thread."""
        torch._foreach_copy_(flats, gradients)
        ready()

    def copy_out(self, flats: Tensors, gradients: Tensors) -> None:
        """Copy reduced gradients back. They have arrived for those who wait for a future completed later."""
        torch._foreach_copy_(gradients, flats)

    def future(self) -> FutureBuffer:
        """Return a future for a bucket on this device."""
        return torch.futures.Future()

    def complete(self, future: FutureBuffer, buffer: torch.Tensor) -> None:
        """Complete a future after all gradients of its bucket were copied out."""
        future.set_result(buffer)

    def close(self) -> None:
        """End the threads."""


class StreamStaging(Staging):
    """Copies on one stream of a GPU, on which buckets are reduced, too. Nothing waits for the device."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream

    def copy_in(self, gradients: Tensors, flats: Tensors, ready: Callable[[], None]) -> None:
        """Queue the copies, and call `ready`, whose work on the stream follows them."""
        _copy(self._stream, gradients, flats, gradients, after=torch.cuda.current_stream(self._device))
        ready()

    def copy_out(self, flats: Tensors, gradients: Tensors) -> None:
        """Queue the copies."""
        _copy(self._stream, flats, gradients, gradients)

    def future(self) -> FutureBuffer:
        """Return a future that makes the waiting stream wait for this one."""
        return torch.futures.Future(devices=[self._device])

    def complete(self, future: FutureBuffer, buffer: torch.Tensor) -> None:
        """Set the future's result, with this stream as the current one."""
        with torch.cuda.stream(self._stream):
            future.set_result(buffer)


class CudaStaging(StreamStaging):
    """Copies through pinned memory, on one stream per direction, in parallel to computation.

    `flats` must be pinned. A thread of its own waits for the copies, so that the ring's threads never wait
    for CUDA.
    """

    def __init__(self, device: torch.device, on_error: Callable[[Exception], None]) -> None:
        super().__init__(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self._on_error = on_error
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._wait, name=f"staging {device}", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Do not overwrite our buckets before the last iteration's gradients were copied back."""
        self._down.wait_stream(self._stream)

    def copy_in(self, gradients: Tensors, flats: Tensors, ready: Callable[[], None]) -> None:
        """Copy in the background; this object's thread calls `ready`."""
        _copy(self._down, gradients, flats, gradients, after=torch.cuda.current_stream(self._device))
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._down)
        self._copies.put((event, ready))

    def close(self) -> None:
        """End the thread."""
        self._copies.put(None)
        self._thread.join()

    def _wait(self) -> None:
        try:
            while (copies := self._copies.get()) is not None:
                event, ready = copies
                event.synchronize()
                ready()
        except Exception as error:  # noqa: BLE001 - otherwise backward would wait for ever
            self._on_error(error)


def _copy(
    stream: torch.cuda.Stream,
    source: Tensors,
    destination: Tensors,
    gradients: Tensors,
    *,
    after: torch.cuda.Stream | None = None,
) -> None:
    """Queue copies on a stream, `after` the one that computes gradients. Their memory stays until then."""
    if after is not None:
        stream.wait_stream(after)
    with torch.cuda.stream(stream):
        torch._foreach_copy_(destination, source, non_blocking=True)
        for gradient in gradients:
            gradient.record_stream(stream)
