"""Moves gradients between DDP's buckets, on their device, and our flat ones, in host memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Tensors = list[torch.Tensor]
Gradients = torch.futures.Future[torch.Tensor]


class Staging(Protocol):
    """One device's way."""

    def begin(self) -> None:
        """An iteration begins; from the thread that runs backward."""

    def take(self, flats: Tensors, gradients: Tensors, ready: Callable[[], None]) -> None:
        """Copy gradients into our buckets, and call `ready` once they are there, on whatever thread."""

    def give(self, gradients: Tensors, flats: Tensors) -> None:
        """Copy reduced gradients back, for whoever waits for a future that is completed afterwards."""

    def future(self) -> Gradients:
        """For a bucket of this device."""
        ...

    def complete(self, future: Gradients, buffer: torch.Tensor) -> None:
        """Everything of this bucket of DDP's was given back."""

    def close(self) -> None:
        """End what it has begun."""


def staging_for(device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
    """The staging of a device; `on_error` is for what fails on a thread of its own."""
    return CudaStaging(device, on_error) if device.type == "cuda" else HostStaging()


class HostStaging:
    """Plain copies, for gradients on the CPU."""

    def begin(self) -> None:
        """Nothing is under way."""

    def take(self, flats: Tensors, gradients: Tensors, ready: Callable[[], None]) -> None:
        """Copied when it returns."""
        torch._foreach_copy_(flats, gradients)
        ready()

    def give(self, gradients: Tensors, flats: Tensors) -> None:
        """Copied when it returns."""
        torch._foreach_copy_(gradients, flats)

    def future(self) -> Gradients:
        """Of no device."""
        return torch.futures.Future()

    def complete(self, future: Gradients, buffer: torch.Tensor) -> None:
        """At once."""
        future.set_result(buffer)

    def close(self) -> None:
        """Nothing to end."""


class CudaStaging:
    """Copies by way of pinned memory, on a stream for each direction, so that computing goes on meanwhile.

    `flats` must be pinned. A thread of its own waits for the copies, for the ring's are no CUDA threads.
    """

    def __init__(self, device: torch.device, on_error: Callable[[Exception], None]) -> None:
        self._device = device
        self._on_error = on_error
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._taken: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._wait, name=f"staging {device}", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Our buckets are overwritten only after the last iteration's have left them."""
        self._down.wait_stream(self._up)

    def take(self, flats: Tensors, gradients: Tensors, ready: Callable[[], None]) -> None:
        """`ready` is called from a thread of this class."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))  # which has computed the gradients
        with torch.cuda.stream(self._down):
            torch._foreach_copy_(flats, gradients, non_blocking=True)
            for gradient in gradients:
                gradient.record_stream(self._down)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._down)
        self._taken.put((event, ready))

    def give(self, gradients: Tensors, flats: Tensors) -> None:
        """Under way when it returns."""
        with torch.cuda.stream(self._up):
            torch._foreach_copy_(gradients, flats, non_blocking=True)
            for gradient in gradients:
                gradient.record_stream(self._up)

    def future(self) -> Gradients:
        """Whoever waits for it has its own stream wait for the one that copies."""
        return torch.futures.Future(devices=[self._device])

    def complete(self, future: Gradients, buffer: torch.Tensor) -> None:
        """The future notes where the current stream is."""
        with torch.cuda.stream(self._up):
            future.set_result(buffer)

    def close(self) -> None:
        """End the thread."""
        self._taken.put(None)
        self._thread.join()

    def _wait(self) -> None:
        try:
            while (taken := self._taken.get()) is not None:
                event, ready = taken
                event.synchronize()
                ready()
        except Exception as error:  # noqa: BLE001 - backward must not wait for this thread for ever
            self._on_error(error)
