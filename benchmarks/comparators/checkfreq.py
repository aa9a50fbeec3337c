"""CheckFreq: a copy beside the next forward and backward, which is written in the background.

Source: `frequency`'s. The optimizer's step waits while the copy is made, and a checkpoint begins once the one
before is on disk. Rank 0 saves.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparators.flat import FlatState, empty, flatten, restored
from benchmarks.comparators.frequency import Frequency
from benchmarks.comparators.saving import SavedFiles, write
from benchmarks.comparators.system import Place

_END: Final = -1


class CheckFreq(SavedFiles):
    """Saves every `interval` iterations; with `interval` 0, as often as its profile says."""

    name = "CheckFreq"

    def __init__(self, place: Place, frequency: Frequency | None = None) -> None:
        super().__init__(place)
        self.frequency = frequency or Frequency(place.interval)

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Take over the job; on rank 0, start the thread that copies and writes."""
        super().attach(ddp, optimizer)
        self._copied, self._written = threading.Event(), threading.Event()
        self._copied.set()
        self._written.set()
        self._error: BaseException | None = None
        self._orders: queue.SimpleQueue[tuple[int, FlatState | None]] = queue.SimpleQueue()
        self._buffers: FlatState | None = None
        self._ended = time.monotonic()
        if self.rank == 0:
            optimizer.register_step_pre_hook(self._before_step)
            self._thread = threading.Thread(target=self._save_all, daemon=True)
            self._thread.start()

    @property
    def interval(self) -> int:
        """The number of iterations from one checkpoint to the next, now; 0 on ranks that do not save."""
        return self.frequency.interval

    def after_step(self, iteration: int) -> None:
        """Begin the checkpoint on rank 0, if it is due."""
        if self.rank:
            return
        now = time.monotonic()
        if self.frequency.iterated(now - self._ended):
            self._profile(iteration)
            now = time.monotonic()  # the checkpoint alone is not a part of the next iteration
        elif self.frequency.interval and (iteration + 1) % self.frequency.interval == 0:
            self._begin(iteration)
        self._ended = now

    def finish(self) -> None:
        """Wait until the checkpoint that has begun is on disk."""
        self._written.wait()
        self._check()

    def close(self) -> None:
        """Finish, and end the thread."""
        self.finish()
        if self.rank == 0:
            self._orders.put((_END, None))
            self._thread.join()

    def _before_step(self, *_: object) -> None:
        """Wait until the state is copied, because the step changes it."""
        self._copied.wait()

    def _begin(self, iteration: int) -> None:
        """Order a checkpoint, once the one before is written."""
        self.finish()
        self._copied.clear()
        self._written.clear()
        self._orders.put((iteration, flatten(self.steady_state())))

    def _profile(self, iteration: int) -> None:
        """Measure a checkpoint alone."""
        began = time.monotonic()
        self._begin(iteration)
        self._copied.wait()
        copied = time.monotonic()
        self.finish()
        self.frequency.saved(copied - began, time.monotonic() - began)

    def _save_all(self) -> None:
        """Copy and write what is ordered."""
        while True:
            iteration, flat = self._orders.get()
            if flat is None:
                return
            try:
                copy = self._copy(flat)
                self._copied.set()
                write(copy, iteration, self.place.disk)
            except Exception as error:  # noqa: BLE001 - training raises it
                self._error = error
            finally:
                self._copied.set()
                self._written.set()

    def _copy(self, flat: FlatState) -> dict[str, Any]:
        """Copy a state to buffers that are used again each time."""
        if self._buffers is None or len(self._buffers.tensors) != len(flat.tensors):
            self._buffers = empty(flat.described)
        for buffer, tensor in zip(self._buffers.tensors, flat.tensors, strict=True):
            buffer.copy_(tensor)
        found: dict[str, Any] = restored(FlatState(self._buffers.tensors, flat.described))
        return found

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("a checkpoint could not be written") from self._error
