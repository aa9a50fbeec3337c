"""Keeps the optimizer's step and the copying of seeds apart, one parameter at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

_POLL_SECONDS: Final = 0.0005


class StepExclusion:
    """`begin` and `end` stand around each optimizer step; between steps, `still` lets another thread copy.

    The trainer waits for one copy at most: whoever copies lets it go first.
    """

    def __init__(self, first_iteration: int) -> None:
        self.stepped = first_iteration - 1
        """The iteration after whose step parameters and optimizer state are."""
        self._lock = threading.Lock()
        self._wanted = False
        self._stepping = False

    def begin(self) -> None:
        """The optimizer is about to step. Calling it again, after a step that failed, changes nothing."""
        if not self._stepping:
            self._wanted = True
            self._lock.acquire()
            self._wanted = False
            self._stepping = True

    def end(self, iteration: int) -> None:
        """The optimizer has stepped, or it is known that it skips this iteration."""
        self.stepped = iteration
        if self._stepping:
            self._stepping = False
            self._lock.release()

    @contextlib.contextmanager
    def still(self, ended: threading.Event) -> Iterator[int | None]:
        """Parameters and state stay as they are after the yielded iteration; `None` once `ended` is set."""
        while self._wanted or not self._lock.acquire(timeout=_POLL_SECONDS):
            if ended.is_set():
                yield None
                return
            time.sleep(_POLL_SECONDS)
        try:
            yield self.stepped
        finally:
            self._lock.release()
