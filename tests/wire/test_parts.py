"""The parts of a DP group's gradients that its ranks send."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire.layout import from_json, make_layout
from checkmate.wire.parameter import LayoutError, Parameter
from checkmate.wire.parts import PartSlicing
from checkmate.wire.schedule import StreamName

SLICING = PartSlicing()


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=12).filter(any),
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "float64"]), min_size=12, max_size=12),
    shards=st.integers(1, 5),
    ranks=st.integers(1, 9),
    bucket_bytes=st.integers(1, 20_000),
)
def test_each_element_is_in_one_part_and_parts_are_equal(
    sizes: list[int], dtypes: list[str], shards: int, ranks: int, bucket_bytes: int
) -> None:
    parameters = [
        Parameter(f"p{number}", (size,), dtype)
        for number, (size, dtype) in enumerate(zip(sizes, dtypes, strict=False))
    ]
    layout = from_json(make_layout(parameters, shards, bucket_bytes, SLICING).to_json())
    assert layout.slicing == SLICING
    buckets = layout.schedule
    total = sum(bucket.nbytes for bucket in buckets)
    sent = [set[int]() for _ in buckets]
    for sender in range(ranks):
        streams = [SLICING.stream(buckets, StreamName(sender, 0, shard), 1, ranks) for shard in range(shards)]
        nbytes = sum(stream.nbytes for stream in streams)
        assert abs(nbytes - total / ranks) <= 16, "cut at whole elements"
        for shard, stream in enumerate(streams):
            assert stream.nbytes == sum(
                len(piece.where) * buckets[piece.bucket].itemsize for piece in stream.pieces
            )
            offset = 0
            for piece in stream.pieces:
                assert piece.offset == offset
                offset += len(piece.where) * buckets[piece.bucket].itemsize
                assert buckets[piece.bucket].shadow_id == shard
                assert sent[piece.bucket].isdisjoint(piece.where)
                sent[piece.bucket].update(piece.where)
            assert stream.nbytes == offset
    assert [len(elements) for elements in sent] == [bucket.elements for bucket in buckets]


def test_a_part_is_of_few_shards() -> None:
    layout = make_layout([Parameter(f"p{number}", (100,), "float32") for number in range(64)], 8)
    buckets = layout.schedule
    for sender in range(16):
        shards = [
            shard for shard in range(8) if SLICING.stream(buckets, StreamName(sender, 0, shard), 1, 16).nbytes
        ]
        assert shards == [sender // 2]


def test_every_rank_sends() -> None:
    senders = [position for position in range(-1, 4) if SLICING.is_sender(position, 3)]
    assert senders == [0, 1, 2]


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=12).filter(any),
    owners=st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=12, max_size=12),
    shards=st.integers(1, 4),
    bucket_bytes=st.integers(1, 3000),
)
def test_what_one_rank_alone_has_is_sent_by_it(
    sizes: list[int], owners: list[int | None], shards: int, bucket_bytes: int
) -> None:
    """All else is divided among all ranks as without it, and each element has one sender."""
    ranks = 4
    parameters = [
        Parameter(f"p{n}", (size,), "float32", state="" if owner is None else "s", owner=_owner(owner))
        for n, (size, owner) in enumerate(zip(sizes, owners, strict=False))
    ]
    layout = from_json(make_layout(parameters, shards, bucket_bytes, SLICING).to_json())
    assert layout.parameters == tuple(parameters)
    sender_of: dict[tuple[int, int], int] = {}
    for sender in range(ranks):
        for shard in range(shards):
            name = StreamName(sender, 0, shard)
            for piece in SLICING.stream(layout.schedule, name, 1, ranks).pieces:
                for element in piece.where:
                    assert sender_of.setdefault((piece.bucket, element), sender) == sender
    assert len(sender_of) == sum(sizes)
    shared = [0] * ranks
    for number, (index, place) in layout.where.items():
        senders = {sender_of[index, element] for element in range(place.start, place.stop)}
        if (owner := parameters[number].owner) and senders:
            assert senders == set(owner)
        elif not owner:
            for element in range(place.start, place.stop):
                shared[sender_of[index, element]] += 1
    assert max(shared) - min(shared) <= 2, "cut at whole elements"


def _owner(position: int | None) -> tuple[int, ...]:
    return () if position is None else (position,)


@pytest.mark.parametrize(
    ("owner", "words"), [([0, 1], "has 2 owners"), ([-1], "numbers from 0"), (["a"], "numbers from 0")]
)
def test_a_malformed_owner_is_refused(owner: list[object], words: str) -> None:
    layout = make_layout([Parameter("p", (4,), "float32")], 1, slicing=SLICING)
    document = json.loads(layout.to_json())
    document["parameters"][0] |= {"state": "s", "owner": owner}
    with pytest.raises(LayoutError, match=words):
        from_json(json.dumps(document))
