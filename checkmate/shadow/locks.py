"""The locks of a shadow node, and the order in which threads acquire them.

A thread that holds a lock acquires only locks that follow it in `ORDER`. No thread steps, receives or uses
the network while it holds `node`. Tests switch on `check_order`, which checks each acquisition.
"""

from __future__ import annotations

import threading
from typing import Final

ORDER: Final = ("attempt", "node", "hold", "inlet", "replica", "reader")
"""`attempt`: one connection attempt of a stream (`receive.connector`). `node`: the node's state (`node`).
`hold`: a hold's replica and buckets, for a whole step (`hold`). `inlet`: a stream's socket and position
(`receive.inlet`). `replica`: reservations of its readers (`replica.replica`). `reader`: the streams of a NIC
(`receive.reader`).
"""


class LockOrderError(AssertionError):
    """A thread has acquired a lock that precedes one that it holds."""


class _Held(threading.local):
    """The locks that this thread holds."""

    def __init__(self) -> None:
        self.locks: list[OrderedLock] = []


_held = _Held()
_checked = False


def check_order(on: bool) -> None:
    """Switch the check of the order on or off."""
    global _checked  # noqa: PLW0603 - a switch of the whole process, for its tests
    _checked = on


class OrderedLock:
    """A non-reentrant lock with a place in `ORDER`. A context manager."""

    def __init__(self, name: str) -> None:
        """Raise `ValueError` if `name` is not in `ORDER`."""
        self.name = name
        self._place = ORDER.index(name)
        self._lock = threading.Lock()

    def acquire(self) -> None:
        """Acquire the lock. Raise `LockOrderError` if the order is checked and violated."""
        if _checked and any(lock._place >= self._place for lock in _held.locks):
            held = ", ".join(lock.name for lock in _held.locks)
            raise LockOrderError(f"lock {self.name!r} acquired while holding {held}; the order is {ORDER}")
        self._lock.acquire()
        _held.locks.append(self)

    def release(self) -> None:
        """Release the lock, in the thread that has acquired it."""
        _held.locks.remove(self)
        self._lock.release()

    def _is_owned(self) -> bool:
        """Return whether this thread holds it, for `threading.Condition`."""
        return self in _held.locks

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
