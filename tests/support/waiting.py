"""Waiting for conditions, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_SECONDS = 0.02


def wait_until(
    condition: Callable[[], object], event: str = "what was waited for", seconds: float = 60.0
) -> None:
    """Poll `condition()` until it is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{event}: not within {seconds:g} s"
        time.sleep(_POLL_SECONDS)
