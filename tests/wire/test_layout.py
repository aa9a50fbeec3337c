"""The layout: every element in one place, buckets and shards as promised, the same from its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire.layout import from_json, make_layout
from checkmate.wire.parameter import ITEMSIZES, LayoutError, Parameter, dim_order
from checkmate.wire.shares import Share

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
ORDERED = SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape)))))
MODELS = st.lists(st.tuples(ORDERED, st.sampled_from(sorted(ITEMSIZES))), min_size=1, max_size=30).map(
    lambda drawn_shapes: [
        Parameter.of(f"p{i}", shape, in_memory(shape, order).stride(), dtype)
        for i, ((shape, order), dtype) in enumerate(drawn_shapes)
    ]
)


def in_memory(shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    """Return a tensor whose dimensions have this order in memory, outermost first."""
    placed = torch.empty([shape[d] for d in order], device="meta")
    return placed.permute([order.index(d) for d in range(len(shape))])


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
    numbers = [number for shard in range(shards) for number in layout.of_shard(shard)]
    assert sorted(numbers) == [*range(len(model))]
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
    order = [i for shard in range(shards) for i in layout.of_shard(shard) if model[i].elements]
    if len({p.dtype for p in model}) == 1:
        assert order == sorted(order, reverse=True)  # in the order in which backward completes gradients


@given(MODELS, st.integers(1, 8), st.integers(1, 4000))
def test_json_gives_the_same_layout(model: list[Parameter], shards: int, bucket_bytes: int) -> None:
    if not any(p.elements for p in model):
        return
    layout = make_layout(model, shards, bucket_bytes)
    again = from_json(layout.to_json())
    assert again == layout
    assert again.fingerprint == layout.fingerprint
    assert make_layout(model, shards, bucket_bytes + 1).fingerprint != layout.fingerprint


@given(MODELS, st.integers(1, 3), st.integers(1, 4))
def test_shares_have_each_parameter_once(model: list[Parameter], shards: int, count: int) -> None:
    filled = [p for p in model if p.elements]
    if len(filled) < count:
        with pytest.raises(
            LayoutError, match="no parameter" if not filled else "each share needs a parameter"
        ):
            make_layout(model, shards, share=Share(0, count))
        return
    shares = [make_layout(model, shards, 500, share=Share(index, count)) for index in range(count)]
    numbers = [number for layout in shares for shard in range(shards) for number in layout.of_shard(shard)]
    assert sorted(numbers) == [*range(len(model))]
    sizes = [sum(bucket.nbytes for bucket in layout.schedule) for layout in shares]
    assert max(sizes) - min(sizes) <= max(p.nbytes for p in model)
    for layout in shares:
        assert layout.parameters == tuple(model), "all have the numbers of the whole model"
        assert from_json(layout.to_json()) == layout
    assert len({layout.fingerprint for layout in shares}) == count


def test_a_share_that_does_not_exist_is_refused() -> None:
    document = json.loads(
        make_layout([Parameter("w", (2, 3), "float32")] * 3, 1, share=Share(1, 2)).to_json()
    )
    assert document["share"] == [1, 2]
    for wrong in ([2, 2], [0, 4], [0, 1 << 40], [0], [0, 0], 5, None):
        with pytest.raises(LayoutError, match="not a layout"):
            from_json(json.dumps({**document, "share": wrong}))


SMALL = st.lists(st.integers(1, 4), max_size=5).map(tuple)


@given(SMALL.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))))
def test_a_dense_tensor_is_contiguous_in_the_order_of_its_dimensions(
    shape_and_order: tuple[tuple[int, ...], list[int]],
) -> None:
    shape, order = shape_and_order
    tensor = in_memory(shape, order)
    says = dim_order(shape, tensor.stride())
    assert tensor.is_contiguous() == (not says)
    assert not says or tensor.permute(says).is_contiguous()
    strides = [7 if size == 1 else stride for size, stride in zip(shape, tensor.stride(), strict=True)]
    assert dim_order(shape, strides) == says  # without a second element, a stride has no meaning
    parameter = Parameter.of("p", shape, strides, "float32")
    assert parameter.memory_shape == (tuple(tensor.permute(says).shape) if says else shape)


def test_the_memory_formats_of_pytorch() -> None:
    image, volume = torch.empty(8, 3, 5, 5), torch.empty(8, 3, 2, 5, 5)
    flat = image.to(memory_format=torch.channels_last)
    assert dim_order(flat.shape, flat.stride()) == (0, 2, 3, 1)
    deep = volume.to(memory_format=torch.channels_last_3d)
    assert dim_order(deep.shape, deep.stride()) == (0, 2, 3, 4, 1)
    assert dim_order((6, 4), torch.empty(4, 6).t().stride()) == (1, 0)
    assert dim_order((), ()) == dim_order((0, 3), (1, 7)) == ()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, 1).expand(3, 4),
        torch.empty(8)[::2],
        torch.empty(4, 6)[:, :5],
        torch.empty(9).as_strided((2, 3), (1, 1)),
    ],
    ids=["expanded", "every other", "a part", "overlapping"],
)
def test_what_is_not_dense_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"^head\.weight cannot be protected: .* overlap or have gaps"):
        Parameter.of("head.weight", tensor.shape, tensor.stride(), "float32")


def test_a_chunk_keeps_its_place_in_the_whole_parameter() -> None:
    """A layout without chunks is described as before there were any."""
    rows = Parameter("w", (2, 3), "float32")
    chunk = replace(rows, whole=(5, 3), offset=(3, 0))
    layout = make_layout([chunk], 1)
    assert from_json(layout.to_json()).parameters == (chunk,)
    assert layout.fingerprint != make_layout([replace(chunk, offset=(0, 0))], 1).fingerprint
    assert "whole" not in make_layout([rows], 1).to_json()
    frozen = Parameter("norm", (3,), "int8", whole=(6,), offset=(3,))
    assert from_json(make_layout([chunk], 1, frozen=[frozen]).to_json()).frozen == (frozen,)
    with pytest.raises(LayoutError, match=r"norm, \(3,\) at \(4,\), is not within \(6,\)"):
        make_layout([chunk], 1, frozen=[replace(frozen, offset=(4,))])


def test_a_gradient_may_have_another_type_than_its_parameter() -> None:
    layout = make_layout([Parameter("w", (2, 3), "float32", gradient="bfloat16")], 1)
    assert from_json(layout.to_json()) == layout
    assert [(bucket.dtype, bucket.elements) for bucket in layout.buckets] == [("bfloat16", 6)]
    assert layout.schedule[0].itemsize == 2
    with pytest.raises(LayoutError, match="w has type int64; gradients may be"):
        make_layout([Parameter("w", (3,), "float32", gradient="int64")], 1)


@pytest.mark.parametrize(
    ("whole", "offset"), [((5, 3), (4, 0)), ((5,), (0,)), ((5, 3), ()), ((), (0, 0)), ((5, 2), (0, 0))]
)
def test_a_chunk_outside_of_its_parameter_is_refused(whole: tuple[int, ...], offset: tuple[int, ...]) -> None:
    text = make_layout([Parameter("w", (2, 3), "float32")], 1).to_json()
    described = json.loads(text)
    described["parameters"][0] |= {"whole": whole, "offset": offset}
    with pytest.raises(LayoutError, match=r"w, \(2, 3\) at .* is not within"):
        from_json(json.dumps(described))


def test_faults_are_named() -> None:
    with pytest.raises(LayoutError, match=r"w has dimensions \[0, 1\], not \(0, 0\)"):
        make_layout([Parameter("w", (3, 3), "float32", (0, 0))], 1)
    with pytest.raises(LayoutError, match="w has type int64"):
        make_layout([Parameter("w", (3,), "int64")], 1)
    with pytest.raises(LayoutError, match="0 shards"):
        make_layout([Parameter("w", (3,), "float32")], 0)
    for text in ("", "[]", "{}", '{"parameters": [], "shards": 1, "bucket_bytes": 1}'):
        with pytest.raises(LayoutError):
            from_json(text)
