"""Whole tensors from chunks: of any mesh, with replicas; and what is not a whole tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.consolidate.chunks import Box, Cover, equal_bits
from checkmate.state import StateError


@dataclass(frozen=True)
class Cuts:
    """A tensor's shape, and where each dimension is cut; repeated places make empty chunks."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def boxes(self) -> list[Box]:
        runs = [
            [*itertools.pairwise((0, *cuts, size))] for size, cuts in zip(self.shape, self.cuts, strict=True)
        ]
        return [
            Box(tuple(start for start, _ in place), tuple(stop - start for start, stop in place))
            for place in itertools.product(*runs)
        ]


@st.composite
def cut_tensors(draw: st.DrawFn) -> Cuts:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    places = [tuple(sorted(draw(st.lists(st.integers(0, size), max_size=3)))) for size in shape]
    return Cuts(shape, tuple(places))


def with_replicas(data: st.DataObject, boxes: Sequence[Box]) -> dict[int, Box]:
    """Return the boxes in any order, some of them several times."""
    more = data.draw(st.lists(st.sampled_from(boxes), max_size=3))
    return dict(enumerate(data.draw(st.permutations([*boxes, *more]))))


def noise(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor with not-a-numbers, which are equal only by their bits."""
    values = torch.arange(math.prod(shape), dtype=torch.float32).view(tuple(shape))
    values[values % 5 == 3] = torch.nan
    return values.to(dtype)


@given(st.data(), cut_tensors(), st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
def test_chunks_of_any_mesh_are_the_tensor(data: st.DataObject, cuts: Cuts, dtype: torch.dtype) -> None:
    boxes = with_replicas(data, cuts.boxes())
    whole = noise(cuts.shape, dtype)
    chunks = {group: whole[box.slices].clone() for group, box in boxes.items()}
    assembled = Cover("w", cuts.shape, boxes).assemble("w", chunks)
    assert (assembled.shape, assembled.dtype) == (whole.shape, dtype)
    assert torch.equal(assembled.float().nan_to_num(-1), whole.float().nan_to_num(-1))


@given(st.data(), cut_tensors())
def test_a_chunk_that_is_missing_is_an_error(data: st.DataObject, cuts: Cuts) -> None:
    boxes = cuts.boxes()
    full = [box for box in boxes if box.elements]
    if not full:
        return
    missing_box = data.draw(st.sampled_from(full))
    remaining = {group: box for group, box in enumerate(boxes) if box != missing_box}
    with pytest.raises(StateError, match=r"^w: a chunk is missing: DP groups have"):
        Cover("w", cuts.shape, remaining)


@given(st.data(), cut_tensors())
def test_other_bits_of_the_same_chunk_are_an_error(data: st.DataObject, cuts: Cuts) -> None:
    full = [box for box in cuts.boxes() if box.elements]
    if not full:
        return
    boxes = dict(enumerate([*full, data.draw(st.sampled_from(full))]))
    whole = noise(cuts.shape)
    chunks = {group: whole[box.slices].clone() for group, box in boxes.items()}
    first = full.index(boxes[len(full)])
    chunks[len(full)].view(-1).view(torch.int32)[-1] += 1
    with pytest.raises(StateError, match=rf"^exp_avg of w: DP groups {first} and {len(full)} have the same"):
        Cover("w", cuts.shape, boxes).assemble("exp_avg of w", chunks)


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        (
            [Box((0,), (3,)), Box((2,), (4,))],
            r"of DP group 1, \[4\] at \[2\], overlaps that of DP group 0, \[3\]",
        ),
        ([Box((0,), (6,)), Box((2,), (2,))], r"overlaps that of DP group 0, \[6\] at \[0\]"),
        ([Box((0,), (3,)), Box((4,), (3,))], r"of DP group 1, \[3\] at \[4\], is not within \[6\]"),
        ([Box((0, 0), (3, 2))], r"is not within \[6\]"),
        (
            [Box((0,), (3,)), Box((3,), (2,))],
            r"have 5 of the 6 elements of \[6\]: \[3\] at \[0\] in DP group 0",
        ),
        ([Box((6,), (0,))], "have 0 of the 6 elements of .*: none"),
    ],
)
def test_what_is_not_a_whole_tensor(boxes: list[Box], words: str) -> None:
    with pytest.raises(StateError, match=words):
        Cover("w", (6,), dict(enumerate(boxes)))


def test_chunks_of_different_types_are_an_error() -> None:
    cover = Cover("w", (2,), {0: Box((0,), (1,)), 1: Box((1,), (1,))})
    with pytest.raises(StateError, match=r"^w has different types: torch.bfloat16, torch.float32"):
        cover.assemble("w", {0: torch.ones(1), 1: torch.ones(1, dtype=torch.bfloat16)})


@given(st.data(), cut_tensors())
def test_a_part_needs_only_the_chunks_that_it_touches(data: st.DataObject, cuts: Cuts) -> None:
    boxes = with_replicas(data, cuts.boxes())
    whole = noise(cuts.shape)
    offset = tuple(data.draw(st.integers(0, size)) for size in cuts.shape)
    shape = tuple(data.draw(st.integers(0, size - at)) for at, size in zip(offset, cuts.shape, strict=True))
    part = Box(offset, shape)
    cover = Cover("p", cuts.shape, boxes)
    needed = cover.needed_for(part)
    chunks = {group: whole[boxes[group].slices].clone() for group in needed}
    assert equal_bits(cover.assemble("p", chunks, part), whole[part.slices])
    touched = {boxes[group] for group in needed} if part.elements else set()
    assert all(box.common(part) is not None for box in touched)
    assert sum(common.elements for box in touched if (common := box.common(part))) == part.elements
