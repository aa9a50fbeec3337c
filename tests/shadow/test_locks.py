"""The order of a shadow node's locks, which the conftest checks in all tests."""

from __future__ import annotations

import threading

import pytest

from checkmate.shadow.locks import ORDER
from tests.support.shadow.checked_locks import CheckedLock, LockOrderError


@pytest.mark.parametrize("second", ORDER[: ORDER.index("hold") + 1])
def test_a_lock_is_not_taken_under_one_that_stands_after_it(second: str) -> None:
    with CheckedLock("hold"), pytest.raises(LockOrderError, match=f"{second!r} acquired while holding hold"):
        CheckedLock(second).acquire()
    with CheckedLock(second):
        pass  # no lock is held


def test_locks_may_be_taken_in_order_and_let_go_in_any() -> None:
    locks = [CheckedLock(name) for name in ORDER]
    for lock in locks:
        lock.acquire()
    for lock in (locks[2], *locks[:2], *locks[3:]):
        lock.release()
    with locks[-1], pytest.raises(LockOrderError):
        locks[0].acquire()


def test_what_another_thread_holds_does_not_count() -> None:
    there, go_on = threading.Event(), threading.Event()
    inner, outer = CheckedLock("reader"), CheckedLock("node")

    def hold() -> None:
        with inner:
            there.set()
            assert go_on.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert there.wait(5)
    with outer:
        pass
    go_on.set()
    thread.join()


def test_a_condition_waits_with_a_lock_of_the_order() -> None:
    condition = threading.Condition(CheckedLock("node"))  # type: ignore[arg-type]
    with condition:
        assert not condition.wait(0.01)
        condition.notify_all()
