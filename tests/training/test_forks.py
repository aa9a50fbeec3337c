"""Objects that DataLoader workers inherit and must not free."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest

import checkmate.training.forks  # importing it is enough


class Garbage:
    """Part of a reference cycle, like a finished call; its end is noted."""

    def __init__(self, pids: list[int]) -> None:
        self.itself = self
        self.pids = pids

    def __del__(self) -> None:
        self.pids.append(os.getpid())


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Collect garbage only explicitly."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def in_child(work: Callable[[], bool]) -> bool:
    """Return the result of `work` in a forked child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_leaves_its_parents_garbage_alone(by_hand: None) -> None:
    pids: list[int] = []
    Garbage(pids)

    def collects_its_own_only() -> bool:
        gc.collect()
        is_inherited = not pids
        Garbage(pids)
        gc.collect()
        return is_inherited and pids == [os.getpid()]

    assert in_child(collects_its_own_only)
    assert not pids
    gc.collect()
    assert pids == [os.getpid()]


@pytest.mark.parametrize("on", [True, False])
def test_both_go_on_collecting_if_they_did(by_hand: None, on: bool) -> None:
    if on:
        gc.enable()
    assert in_child(lambda: gc.isenabled() == on)
    assert gc.isenabled() == on
    assert gc.get_freeze_count() == 0


def test_grpc_is_told_before_it_is_imported() -> None:
    assert checkmate.training.forks
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"
