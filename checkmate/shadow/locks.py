"""The locks of a shadow node, and the one order in which they are taken.

A thread that holds a lock takes only locks that stand after it in `ORDER`. Nobody steps, receives or talks to
the network under `node`. `check_order` has each acquisition checked; the tests switch it on.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

ORDER: Final = ("attempt", "node", "hold", "inlet", "replica", "reader")
"""`attempt`: one connection attempt of a stream (`connecting`). `node`: the node's state (`node`). `hold`: a
hold's replica and buckets, taken for a whole step (`hold`). `inlet`: a stream's socket and position
(`inlet`). `replica`: what its readers have reserved (`replica`). `reader`: the streams of a NIC (`receive`).
"""

_held = threading.local()
_checked = False


class LockOrderError(AssertionError):
    """A thread has taken a lock that stands before one that it holds."""


def check_order(on: bool) -> None:
    """Check the order from now on, for locks that are not held at the moment."""
    global _checked  # noqa: PLW0603 - a switch of the whole process, for its tests
    _checked = on


class OrderedLock:
    """A lock that knows its place in `ORDER`; not re-entrant. Context manager."""

    def __init__(self, name: str) -> None:
        """`ValueError` for a name that `ORDER` lacks."""
        self.name = name
        self._place = ORDER.index(name)
        self._lock = threading.Lock()
        self._owner = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, as `threading.Lock` does. `LockOrderError` if the order is checked and broken."""
        if _checked:
            self._check()
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._owner = threading.get_ident()
            if _checked:
                _places().append(self._place)
        return taken

    def release(self) -> None:
        """Let it go."""
        self._owner = 0
        self._lock.release()
        if _checked and self._place in _places():
            _places().remove(self._place)

    def locked(self) -> bool:
        """Return whether anybody holds it."""
        return self._lock.locked()

    def _is_owned(self) -> bool:
        """Return whether this thread holds it; `threading.Condition` asks."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _check(self) -> None:
        if _places() and max(_places()) >= self._place:
            held = ", ".join(ORDER[place] for place in _places())
            raise LockOrderError(f"the lock {self.name!r} is taken under {held}; the order is {ORDER}")


def _places() -> list[int]:
    """Places of the locks that this thread holds."""
    found: list[int] | None = getattr(_held, "places", None)
    if found is None:
        found = _held.places = []
    return found
