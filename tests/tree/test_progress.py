"""The order of slices in a tree, simulated: all ranks, links that have little room, and any timing."""

from __future__ import annotations

import random
from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.ring.steps import Arrival
from checkmate.tree.progress import SliceSequence, TreeLink, TreeProgress, TreeWay, links, tree_slices
from checkmate.wire.schedule import FIRST, LAST, Bucket
from checkmate.wire.tree import tree_place
from tests.support.rings import random_values, same_bits
from tests.support.trees import tree_average

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SimulatedTree:
    """One tree of all ranks, whose links hold at most `room` slices."""

    def __init__(
        self, tensors: list[list[torch.Tensor]], sequence: SliceSequence, side: int, room: int
    ) -> None:
        self.ranks = len(tensors)
        self.tensors, self.sequence, self.room = tensors, sequence, room
        self.places = [tree_place(self.ranks, rank, side) for rank in range(self.ranks)]
        self.progress = [TreeProgress(place) for place in self.places]
        self.wires: dict[tuple[int, int], deque[torch.Tensor]] = {}

    def try_pass(self, rank: int, link: TreeLink) -> bool:
        """Pass a slice over a rank's link, if it may and the link has room or a slice."""
        progress, place = self.progress[rank], self.places[rank]
        if not progress.may_pass(link):
            return False
        up = link.way in (TreeWay.SUM_OUT, TreeWay.RESULT_IN)
        peer = place.parent if up else place.children[link.child]
        assert peer is not None
        wire = self.wires.setdefault((rank, peer) if link.way.sends else (peer, rank), deque())
        part = self.sequence.slice(progress.passed(link))
        here = self.tensors[rank][part.bucket]
        where = slice(part.start // here.element_size(), part.stop // here.element_size())
        if link.way.sends:
            if len(wire) == self.room:
                return False
            wire.append(here[where].clone())
        else:
            if not wire:
                return False
            data, arrival = wire.popleft(), progress.arrival(link)
            here[where] = data if arrival is Arrival.KEEP else here[where] + data
            if arrival is Arrival.AVERAGE:
                here[where] /= self.ranks
        progress.note_passed(link)
        return True


@given(
    ranks=st.one_of(st.integers(2, 9), st.sampled_from([16, 33, 64])),
    elements=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    channels=st.integers(1, 2),
    slice_bytes=st.sampled_from([8, 24, 1 << 20]),
    room=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_all_ranks_have_the_sum_in_the_defined_order(
    ranks: int, elements: list[int], dtype: torch.dtype, channels: int, slice_bytes: int, room: int, seed: int
) -> None:
    values = [random_values(ranks, count, dtype, seed + i) for i, count in enumerate(elements)]
    tensors = [[bucket[rank].clone() for bucket in values] for rank in range(ranks)]
    buckets = [Bucket(count, dtype.itemsize, 0) for count in elements]
    chance = random.Random(seed)
    for channel in range(channels):
        for side in (FIRST, LAST):
            sequence = SliceSequence.of(
                [*tree_slices(buckets, channels, channel, side, slice_bytes)], len(buckets)
            )
            tree = SimulatedTree(tensors, sequence, side, room)
            work = [(rank, link) for rank in range(ranks) for link in links(tree.places[rank])]
            for progress in tree.progress:
                progress.submit(sequence.slices_until(1))
            has_moved = True
            while has_moved:
                chance.shuffle(work)
                has_moved = sum(tree.try_pass(rank, link) for rank, link in work) > 0
                if not has_moved and tree.progress[0].complete < len(sequence.slices):
                    for progress in tree.progress:  # the rest, once the first bucket is done
                        assert progress.complete == sequence.slices_until(1)
                        progress.submit(len(sequence.slices))
                    has_moved = True
            assert {progress.complete for progress in tree.progress} == {len(sequence.slices)}
    expected = [tree_average(bucket, channels) for bucket in values]
    for rank in range(ranks):
        assert all(same_bits(a, b) for a, b in zip(tensors[rank], expected, strict=True)), rank


def test_slices_of_an_iteration_follow_each_other() -> None:
    sequence = SliceSequence.of(
        [*tree_slices([Bucket(4, 4, 0), Bucket(0, 4, 0), Bucket(8, 4, 0)], 1, 0, 0, 8)], 3
    )
    assert [sequence.slices_until(count) for count in range(7)] == [0, 1, 1, 3, 4, 4, 6]
    assert sequence.slice(4) == sequence.slices[1]
    assert [part.chunk for part in sequence.slices] == [8, 16, 0]


def test_buckets_without_elements_have_no_slices() -> None:
    sequence = SliceSequence.of([], 2)
    assert [sequence.slices_until(count) for count in range(4)] == [0, 0, 0, 0]
