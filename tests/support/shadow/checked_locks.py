"""Locks that check the order of a shadow node's locks."""

from __future__ import annotations

import threading

from checkmate.shadow.locks import ORDER


class LockOrderError(AssertionError):
    """A thread has acquired a lock that precedes one that it holds."""


class _ThreadLocks(threading.local):
    """The locks that this thread holds."""

    def __init__(self) -> None:
        self.locks: list[CheckedLock] = []


_thread_locks = _ThreadLocks()


class CheckedLock:
    """A non-reentrant lock with a place in `ORDER`. A context manager."""

    def __init__(self, name: str) -> None:
        """Raise `ValueError` if `name` is not in `ORDER`."""
        self.name = name
        self._place = ORDER.index(name)
        self._lock = threading.Lock()

    def acquire(self) -> None:
        """Acquire the lock. Raise `LockOrderError` if that violates the order."""
        if any(lock._place >= self._place for lock in _thread_locks.locks):
            names = ", ".join(lock.name for lock in _thread_locks.locks)
            raise LockOrderError(f"lock {self.name!r} acquired while holding {names}; the order is {ORDER}")
        self._lock.acquire()
        _thread_locks.locks.append(self)

    def release(self) -> None:
        """Release the lock, in the thread that has acquired it."""
        _thread_locks.locks.remove(self)
        self._lock.release()

    def _is_owned(self) -> bool:
        """Return whether this thread holds it, for `threading.Condition`."""
        return self in _thread_locks.locks

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
