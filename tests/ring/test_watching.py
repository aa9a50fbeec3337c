"""A rank of a ring notices that the next one has ended, although nothing is sent or received."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest

from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingError, RingPlace
from checkmate.ring.watching import NextWatch
from testbed.ports import free_port
from tests.support.rings import loopback, on_all_ranks
from tests.support.waiting import wait_until

RANKS = 4


@dataclass
class Watched:
    """A rank of a ring, which breaks its connections if the next one has ended."""

    ring: Ring
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = NextWatch(self.ring, self._note_end)

    def _note_end(self, error: RingError) -> None:
        self.errors.append(str(error))
        self.ring.abort()


@pytest.fixture
def ranks() -> list[Watched]:
    port = free_port()
    rings = on_all_ranks(
        RANKS, lambda rank: connect_ring(RingPlace(rank, loopback(RANKS), 1, port=port), timeout=20)
    )
    return [Watched(ring) for ring in rings]


def test_the_end_of_one_is_noticed_by_all(ranks: list[Watched]) -> None:
    """One after another, against the ring: each breaks its connections to the one before."""
    ranks[2].ring.abort()  # as the kernel does for a process that ends
    wait_until(lambda: all(rank.errors for rank in ranks), "all ranks notice", 10)
    for rank in ranks:
        rank.watch.close(well=False)
        rank.ring.close()
    assert [len(rank.errors) for rank in ranks] == [1] * RANKS
    assert "rank 2" in ranks[1].errors[0] and "on the same host, has ended" in ranks[1].errors[0]


def test_what_was_sent_before_the_end_can_still_be_used(ranks: list[Watched]) -> None:
    """A rank that is behind reads the rest of an iteration that the next one has completed."""
    ranks[2].ring.abort()
    time.sleep(0.2)
    assert not any(rank.errors for rank in ranks)
    for rank in ranks:
        rank.watch.close(well=False)
        rank.ring.close()
    assert [rank.errors for rank in ranks] == [[]] * RANKS


def test_ranks_that_close_one_after_another_are_no_error(ranks: list[Watched]) -> None:
    for rank in ranks:
        rank.watch.close(well=True)
        rank.ring.close()
    assert [rank.errors for rank in ranks] == [[]] * RANKS
    assert not [thread for thread in threading.enumerate() if thread.name == "ring watch"]
