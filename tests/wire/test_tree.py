"""The double binary tree: its shape, and its slicing, in which each element is tagged once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire.layout import from_json, make_layout
from checkmate.wire.parameter import LayoutError, Parameter
from checkmate.wire.schedule import FIRST, LAST, RING_SLICING, Bucket, StreamName
from checkmate.wire.tree import TreeSlicing, tree_place


@pytest.mark.parametrize("ranks", [*range(2, 65), 127, 128, 129, 1000])
def test_both_trees_have_all_ranks_and_are_flat(ranks: int) -> None:
    for side, root in ((FIRST, 0), (LAST, ranks - 1)):
        places = [tree_place(ranks, rank, side) for rank in range(ranks)]
        assert [rank for rank, place in enumerate(places) if place.parent is None] == [root]
        assert len(places[root].children) == 1, "the result leaves the root once"
        below = {rank: place.parent for rank, place in enumerate(places)}
        assert {(child, rank) for rank, place in enumerate(places) for child in place.children} == {
            (rank, parent) for rank, parent in below.items() if parent is not None
        }
        assert max(len(place.children) for place in places) <= 2
        for rank in range(ranks):
            levels, at = 0, rank
            while (parent := below[at]) is not None:
                levels, at = levels + 1, parent
            assert levels <= (ranks - 1).bit_length()


@pytest.mark.parametrize("ranks", [*range(2, 65)])
def test_no_rank_but_a_root_passes_on_in_both_trees(ranks: int) -> None:
    for rank in range(1, ranks - 1):
        assert not all(tree_place(ranks, rank, side).children for side in (FIRST, LAST))


BUCKETS = st.lists(
    st.builds(
        Bucket, elements=st.integers(0, 90), itemsize=st.sampled_from([1, 2, 4]), shadow_id=st.integers(0, 2)
    ),
    min_size=1,
    max_size=6,
)


@given(
    buckets=BUCKETS,
    ranks=st.integers(3, 20),
    channels=st.integers(1, 4),
    tree_bytes=st.sampled_from([0, 40, 100, 1000]),
)
def test_streams_have_each_element_once(
    buckets: list[Bucket], ranks: int, channels: int, tree_bytes: int
) -> None:
    slicing = TreeSlicing(tree_bytes)
    copies: dict[tuple[int, int], int] = {}
    for sender in (0, ranks - 1):
        for channel in range(2 * channels):
            for shard in range(3):
                stream = slicing.stream(buckets, StreamName(sender, channel, shard), channels, ranks)
                offset = 0
                for piece in stream.pieces:
                    assert piece.offset == offset
                    assert buckets[piece.bucket].shadow_id == shard
                    assert slicing.by_tree(buckets[piece.bucket]) == (channel >= channels)
                    offset += len(piece.where) * buckets[piece.bucket].itemsize
                    for element in piece.where:
                        copies[piece.bucket, element] = copies.get((piece.bucket, element), 0) + 1
                assert stream.nbytes == offset
    assert copies == {(i, e): 1 for i, bucket in enumerate(buckets) for e in range(bucket.elements)}


def test_a_root_tags_its_half_of_each_small_bucket() -> None:
    buckets = [Bucket(100, 4, 0), Bucket(1000, 4, 0), Bucket(50, 4, 0)]
    slicing = TreeSlicing(400)
    first, last = (slicing.stream(buckets, StreamName(rank, 1, 0), 1, 8) for rank in (0, 7))
    assert [(piece.bucket, piece.where) for piece in first.pieces] == [(0, range(50)), (2, range(25))]
    assert [(piece.bucket, piece.where) for piece in last.pieces] == [(0, range(50, 100)), (2, range(25, 50))]
    by_ring = slicing.stream(buckets, StreamName(7, 0, 0), 1, 8)
    assert {piece.bucket for piece in by_ring.pieces} == {1}
    assert by_ring.pieces == tuple(
        piece
        for piece in RING_SLICING.stream([Bucket(0, 4, 0), buckets[1]], StreamName(7, 0, 0), 1, 8).pieces
    )


def test_a_layout_tells_its_slicing() -> None:
    layout = make_layout([Parameter("weight", (3, 5), "float32")], 1, slicing=TreeSlicing(4096))
    assert from_json(layout.to_json()).slicing == TreeSlicing(4096)
    with pytest.raises(LayoutError, match="must be tree_bytes, each a number"):
        from_json(layout.to_json().replace("4096", '"4096"'))
    with pytest.raises(LayoutError, match="tree_bytes -1: must be 0 to 2147483648"):
        from_json(layout.to_json().replace("4096", "-1"))
