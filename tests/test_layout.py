"""The layout: every element in one place, buckets and shards as promised, the same from its JSON."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.layout import ITEMSIZES, LayoutError, Parameter, from_json, make_layout

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
MODELS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(ITEMSIZES))), min_size=1, max_size=30).map(
    lambda found: [Parameter(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(found)]
)


@given(MODELS, st.integers(1, 8), st.integers(1, 4000))
def test_each_parameter_stands_whole_in_one_bucket(
    model: list[Parameter], shards: int, bucket_bytes: int
) -> None:
    if not any(p.elements for p in model):
        with pytest.raises(LayoutError, match="no parameter"):
            make_layout(model, shards, bucket_bytes)
        return
    layout = make_layout(model, shards, bucket_bytes)
    placed = [place.parameter for bucket in layout.buckets for place in bucket.places]
    assert sorted(placed) == [i for i, p in enumerate(model) if p.elements]
    for bucket in layout.buckets:
        at = 0
        for place in bucket.places:
            assert place.start == at
            at = place.stop
            assert place.stop - place.start == model[place.parameter].elements
            assert model[place.parameter].dtype == bucket.dtype
        assert at == bucket.elements
        before_last = bucket.places[-1].start * ITEMSIZES[bucket.dtype]
        assert before_last < bucket_bytes  # it was not full before
    assert [b.shard for b in layout.buckets] == sorted(b.shard for b in layout.buckets)


@given(MODELS, st.integers(1, 8))
def test_shards_are_balanced_to_a_parameter(model: list[Parameter], shards: int) -> None:
    total = sum(p.nbytes for p in model)
    if not total:
        return
    layout = make_layout(model, shards)
    largest = max(p.nbytes for p in model)
    for shard in range(shards):
        size = sum(model[i].nbytes for i in layout.of_shard(shard))
        assert abs(size - total / shards) <= largest
    order = [i for shard in range(shards) for i in layout.of_shard(shard)]
    if len({p.dtype for p in model}) == 1:
        assert order == sorted(order, reverse=True)  # as backward makes gradients ready


@given(MODELS, st.integers(1, 8), st.integers(1, 4000))
def test_json_gives_the_same_layout(model: list[Parameter], shards: int, bucket_bytes: int) -> None:
    if not any(p.elements for p in model):
        return
    layout = make_layout(model, shards, bucket_bytes)
    again = from_json(layout.to_json())
    assert again == layout
    assert again.fingerprint == layout.fingerprint
    assert make_layout(model, shards, bucket_bytes + 1).fingerprint != layout.fingerprint


def test_faults_are_named() -> None:
    with pytest.raises(LayoutError, match="w has type int64"):
        make_layout([Parameter("w", (3,), "int64")], 1)
    with pytest.raises(LayoutError, match="0 shards"):
        make_layout([Parameter("w", (3,), "float32")], 0)
    for text in ("", "[]", "{}", '{"parameters": [], "shards": 1, "bucket_bytes": 1}'):
        with pytest.raises(LayoutError):
            from_json(text)
