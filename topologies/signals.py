"""Signals around a lab: SIGTERM and SIGHUP unwind like Ctrl-C, and clean-up is not interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise `SystemExit` with the status that shells expect (128 + signal)."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = [(number, signal.signal(number, stop)) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP; they are delivered at the end.

    Child processes do not inherit this, because only Python's delivery is deferred.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    late: list[int] = []
    hold = [signal.SIGINT, *_ENDING]
    before = [(number, signal.signal(number, lambda n, _: late.append(n))) for number in hold]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if late:
        signal.raise_signal(late[0])
