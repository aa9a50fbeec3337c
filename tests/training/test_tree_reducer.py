"""A reducer with small buckets over trees and larger ones around the ring: bits, order and ends."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
import torch

from checkmate.ring.connections import connect_ring
from checkmate.ring.place import RingError, RingPlace
from checkmate.training.gradients.ring_reducer import RingReducer
from checkmate.tree.connections import connect_tree
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.ring_sockets import TREE_CHANNEL_PORTS
from checkmate.wire.tree import TreeSlicing
from testbed.ports import free_port
from tests.support.rings import averaged, loopback, on_all_ranks, random_values, same_bits
from tests.support.trees import tree_average

SIZES = (10, 5000, 300, 9000, 1000, 999)
"""Elements of each parameter, which has a bucket of its own."""
LAYOUT = make_layout(
    [Parameter(f"p{number}", (size,), "float32") for number, size in enumerate(SIZES)],
    1,
    bucket_bytes=1,
    slicing=TreeSlicing(4000),
)


Outcomes = queue.SimpleQueue[int | RingError]


def on_reducers(ranks: int, work: Callable[[int, RingReducer, Outcomes], bool]) -> list[bool]:
    """Return what `work` returns of each rank's reducer and the outcomes that it reports."""
    channels = 2
    of_ring, of_trees = free_port(channels), free_port(TREE_CHANNEL_PORTS * channels)

    def connected(rank: int) -> bool:
        place = RingPlace(rank, loopback(ranks), channels, port=of_ring, fingerprint=LAYOUT.fingerprint)
        beside = RingPlace(rank, loopback(ranks), channels, port=of_trees)
        with ExitStack() as stack:
            ring = stack.enter_context(connect_ring(place, timeout=20))
            tree = stack.enter_context(connect_tree(beside, timeout=20))
            reducer = RingReducer(ring, LAYOUT, tree)
            outcomes: Outcomes = queue.SimpleQueue()
            reducer.open(outcomes.put, outcomes.put)
            stack.callback(reducer.close)
            return work(rank, reducer, outcomes)

    return on_all_ranks(ranks, connected)


def test_buckets_are_reported_in_order_with_the_bits_of_their_way() -> None:
    ranks, iterations = 4, 5
    sizes = [bucket.elements for bucket in LAYOUT.buckets]
    assert {size * 4 <= 4000 for size in sizes} == {True, False}
    values = [
        [random_values(ranks, size, torch.float32, 100 * i + n) for n, size in enumerate(sizes)]
        for i in range(iterations)
    ]

    def work(rank: int, reducer: RingReducer, outcomes: Outcomes) -> bool:
        for iteration in values:
            for number, bucket in enumerate(iteration):
                reducer.tensors[number].copy_(bucket[rank])
                reducer.submit(number)
            assert [outcomes.get(timeout=20) for _ in sizes] == [*range(len(sizes))]
            for tensor, bucket in zip(reducer.tensors, iteration, strict=True):
                average = tree_average if len(tensor) * 4 <= 4000 else averaged
                assert same_bits(tensor, average(bucket, 2))
        return True

    assert all(on_reducers(ranks, work))


@pytest.mark.parametrize("breaks", ["ring", "tree"])
def test_an_error_of_either_is_told_once_and_ends_both(breaks: str) -> None:
    def work(rank: int, reducer: RingReducer, outcomes: Outcomes) -> bool:
        if rank == 1:  # leaves before it has taken part
            (reducer._ring if breaks == "ring" else reducer._tree).abort()  # type: ignore[union-attr]
        with suppress(RingError):  # which was reported already, while buckets were submitted
            for number in range(len(SIZES)):
                reducer.submit(number)
        while not isinstance(outcomes.get(timeout=20), RingError):
            pass
        reducer.close()
        with pytest.raises(queue.Empty):
            outcomes.get(timeout=0.2)
        return True

    assert all(on_reducers(3, work))
