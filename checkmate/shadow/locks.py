"""The locks of a shadow node, and the order in which threads acquire them.

A thread that holds a lock acquires only locks that follow it in `ORDER`. No thread steps, receives or uses
the network while it holds `node`. Tests switch on `check_order`, which checks each acquisition.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

ORDER: Final = ("attempt", "node", "hold", "inlet", "replica", "reader")
"""`attempt`: one connection attempt of a stream (`receive.connector`). `node`: the node's state (`node`).
`hold`: a hold's replica and buckets, for a whole step (`hold`). `inlet`: a stream's socket and position
(`receive.inlet`). `replica`: reservations of its readers (`replica.replica`). `reader`: the streams of a NIC
(`receive.reader`).
"""

_held = threading.local()
_checked = False


class LockOrderError(AssertionError):
    """A thread has acquired a lock that precedes one that it holds."""


def check_order(on: bool) -> None:
    """Switch the check of the order on or off, for locks that are not held at the moment."""
    global _checked  # noqa: PLW0603 - a switch of the whole process, for its tests
    _checked = on


class OrderedLock:
    """A non-reentrant lock with a place in `ORDER`. A context manager."""

    def __init__(self, name: str) -> None:
        """Raise `ValueError` if `name` is not in `ORDER`."""
        self.name = name
        self._place = ORDER.index(name)
        self._lock = threading.Lock()
        self._owner = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire it like `threading.Lock`. Raise `LockOrderError` if the order is checked and violated."""
        if _checked:
            self._check()
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._owner = threading.get_ident()
            if _checked:
                _places().append(self._place)
        return taken

    def release(self) -> None:
        """Release the lock."""
        self._owner = 0
        self._lock.release()
        if _checked and self._place in _places():
            _places().remove(self._place)

    def locked(self) -> bool:
        """Return whether any thread holds it."""
        return self._lock.locked()

    def _is_owned(self) -> bool:
        """Return whether this thread holds it, for `threading.Condition`."""
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
            raise LockOrderError(f"lock {self.name!r} acquired while holding {held}; the order is {ORDER}")


def _places() -> list[int]:
    """Return the places of the locks that this thread holds."""
    found: list[int] | None = getattr(_held, "places", None)
    if found is None:
        found = _held.places = []
    return found
