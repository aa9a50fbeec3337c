"""Mutual exclusion between the optimizer's step and the copying of seeds, one parameter at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

_POLL_SECONDS: Final = 0.0005


class StepExclusion:
    """A lock that gives the trainer priority.

    `begin` and `end` enclose each optimizer step. Between steps, `still` lets another thread copy. The
    trainer waits for at most one copy.
    """

    def __init__(self, first_iteration: int) -> None:
        self.stepped = first_iteration - 1
        """Iteration of the last step that parameters and optimizer state reflect."""
        self._lock = threading.Lock()
        self._trainer_waits = False
        self._stepping = False

    @property
    def settled(self) -> int | None:
        """The iteration that the state reflects; `None` while a step is under way, or has failed half-way."""
        return None if self._stepping else self.stepped

    def begin(self) -> None:
        """Lock before the optimizer steps. Calling it again after a failed step has no effect."""
        if not self._stepping:
            self._trainer_waits = True
            self._lock.acquire()
            self._trainer_waits = False
            self._stepping = True

    def end(self, iteration: int) -> None:
        """Unlock after the optimizer has stepped, or has skipped this iteration."""
        self.stepped = iteration
        if self._stepping:
            self._stepping = False
            self._lock.release()

    @contextlib.contextmanager
    def still(self, closing: threading.Event) -> Iterator[int | None]:
        """Hold the lock; yield the iteration that the state reflects, or `None` once `closing` is set."""
        while self._trainer_waits or not self._lock.acquire(timeout=_POLL_SECONDS):
            if closing.is_set():
                yield None
                return
            time.sleep(_POLL_SECONDS)
        try:
            yield self.stepped
        finally:
            self._lock.release()
