"""CheckFreq: a copy beside the next forward and backward, which is written in the background.

Source: J. Mohan, A. Phanishayee, V. Chidambaram, CheckFreq, FAST '21, sections 4.2 and 4.3; the constants are
those of its code (msr-fiddle/CheckFreq, src/cf_manager.py and cf_iterator.py). The interval of checkpoints is
profiled, and then adapted. The optimizer's step waits while the copy is made, and a checkpoint begins once
the one before is on disk. Rank 0 saves.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparators.flat import FlatState, empty, flatten, restore_state
from benchmarks.comparators.saving import SavedFiles, write
from benchmarks.comparators.system import CheckpointFolders

PROFILED: Final = range(5, 100)
"""The iterations without checkpoints whose mean is the time of an iteration."""
MAX_OVERHEAD: Final = 0.05
"""The overhead above which checkpoints become rarer; 3.5% in the paper, 5% in its code."""
_RARER: Final = 2


class Frequency:
    """The number of iterations from one checkpoint to the next; 0 until it is known."""

    def __init__(
        self, interval: int = 0, *, profiled: range = PROFILED, max_overhead: float = MAX_OVERHEAD
    ) -> None:
        """`interval`: a fixed one, which is neither profiled nor adapted."""
        self.interval = interval
        self.fixed = interval > 0
        self._profiled, self._max_overhead = profiled, max_overhead
        self._plain: list[float] = []
        self._since: list[float] = []
        self._iteration = 0.0

    def add_iteration(self, seconds: float) -> bool:
        """Take the time of an iteration. Return whether the profile of iterations is now complete."""
        if self.fixed:
            return False
        if self.interval:
            self._adapt(seconds)
            return False
        self._plain.append(seconds)
        return len(self._plain) == self._profiled.stop

    def add_checkpoint(self, copying: float, whole: float) -> None:
        """Take the seconds for a copy in memory, and for that and writing it, and derive the interval."""
        self._iteration = fmean(self._plain[self._profiled.start :])
        self.interval = interval_for(self._plain[self._profiled.start :], copying, whole)

    def _adapt(self, seconds: float) -> None:
        self._since.append(seconds)
        if len(self._since) < self.interval:
            return
        plain = len(self._since) * self._iteration
        if (sum(self._since) - plain) / plain > self._max_overhead:
            self.interval += _RARER
        self._since.clear()


def interval_for(iterations: Sequence[float], copying: float, whole: float) -> int:
    """Return how many iterations hide the writing of a checkpoint, of which the next may begin then."""
    return max(1, math.ceil((whole - copying) / fmean(iterations)))


_END: Final = -1


class CheckFreq(SavedFiles):
    """Saves every `interval` iterations; with `interval` 0, as often as its profile says."""

    name = "CheckFreq"

    def __init__(self, place: CheckpointFolders, frequency: Frequency | None = None) -> None:
        super().__init__(place)
        self.frequency = frequency or Frequency(place.interval)

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Take over the job; on rank 0, start the thread that copies and writes."""
        super().attach(ddp, optimizer)
        self._copy_finished, self._write_finished = threading.Event(), threading.Event()
        self._copy_finished.set()
        self._write_finished.set()
        self._error: BaseException | None = None
        self._orders: queue.SimpleQueue[tuple[int, FlatState | None]] = queue.SimpleQueue()
        self._buffers: FlatState | None = None
        self._last_step_end = time.monotonic()
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
        if self.frequency.add_iteration(now - self._last_step_end):
            self._profile(iteration)
            now = time.monotonic()  # the checkpoint alone is not a part of the next iteration
        elif self.frequency.interval and (iteration + 1) % self.frequency.interval == 0:
            self._begin(iteration)
        self._last_step_end = now

    def finish(self) -> None:
        """Wait until the checkpoint that has begun is on disk."""
        self._write_finished.wait()
        self._check()

    def close(self) -> None:
        """Finish, and end the thread."""
        self.finish()
        if self.rank == 0:
            self._orders.put((_END, None))
            self._thread.join()

    def _before_step(self, *_: object) -> None:
        """Wait until the state is copied, because the step changes it."""
        self._copy_finished.wait()

    def _begin(self, iteration: int) -> None:
        """Order a checkpoint, once the one before is written."""
        self.finish()
        self._copy_finished.clear()
        self._write_finished.clear()
        self._orders.put((iteration, flatten(self.steady_state())))

    def _profile(self, iteration: int) -> None:
        """Measure a checkpoint alone."""
        began = time.monotonic()
        self._begin(iteration)
        self._copy_finished.wait()
        copied = time.monotonic()
        self.finish()
        self.frequency.add_checkpoint(copied - began, time.monotonic() - began)

    def _save_all(self) -> None:
        """Copy and write what is ordered."""
        while True:
            iteration, flat = self._orders.get()
            if flat is None:
                return
            try:
                copy = self._copy(flat)
                self._copy_finished.set()
                write(copy, iteration, self.place.disk)
            except Exception as error:  # noqa: BLE001 - training raises it
                self._error = error
            finally:
                self._copy_finished.set()
                self._write_finished.set()

    def _copy(self, flat: FlatState) -> dict[str, Any]:
        """Copy a state to buffers that are used again each time."""
        if self._buffers is None or len(self._buffers.tensors) != len(flat.tensors):
            self._buffers = empty(flat.described)
        for buffer, tensor in zip(self._buffers.tensors, flat.tensors, strict=True):
            buffer.copy_(tensor)
        state: dict[str, Any] = restore_state(FlatState(self._buffers.tensors, flat.described))
        return state

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("a checkpoint could not be written") from self._error
