"""Nested optimizer state as leaves with names, and back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.state import StateError, dumps, leaves, nested

NAMES = st.text("abcxyz_", min_size=1, max_size=5)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.just([])
)
TREES = st.recursive(
    st.one_of(VALUES, st.builds(torch.full, st.just((2,)), st.integers(0, 9))),
    lambda inner: st.one_of(st.dictionaries(NAMES, inner, min_size=1, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, TREES, max_size=4))
def test_state_comes_back_from_its_leaves(entries: dict[str, Any]) -> None:
    by_name = {leaf.name: leaf.value for leaf in leaves(entries)}
    assert dumps(nested(by_name)) == dumps(entries)


def test_lists_with_tensors_have_a_leaf_for_each_item() -> None:
    entries = {"GG": [torch.zeros(2), torch.ones(3)], "Q": [[], []], "hyper": {"betas": (0.9, 0.99)}}
    by_name = {leaf.name: leaf.value for leaf in leaves(entries)}
    assert list(by_name) == ["GG[0]", "GG[1]", "Q[0]", "Q[1]", "hyper.betas"]
    assert dumps(nested(by_name)) == dumps(entries)


def test_leaves_are_replaced_and_removed_where_they_are() -> None:
    entries: dict[str, Any] = {
        "a": 1,
        "list": [torch.zeros(1), torch.zeros(1)],
        "more": OrderedDict(b=2, c=3),
    }
    by_name = {leaf.name: leaf for leaf in leaves(entries)}
    by_name["a"].replace(5)
    by_name["list[1]"].replace(None)
    by_name["more.b"].remove()
    assert (entries["a"], entries["list"][1], entries["more"]) == (5, None, OrderedDict(c=3))
    with pytest.raises(StateError, match=r"list\[0\] of the optimizer state can't be removed"):
        by_name["list[0]"].remove()
    frozen = {"pair": (torch.zeros(1), 2)}
    with pytest.raises(StateError, match="can't be replaced"):
        next(leaves(frozen)).replace(3)


def test_what_cant_be_stored_is_named() -> None:
    with pytest.raises(StateError, match=r"deep\.x of the optimizer state: only tensors"):
        list(leaves({"deep": {"x": object()}}))
    endless: dict[str, Any] = {}
    endless["in"] = endless
    with pytest.raises(StateError, match="nested in more than"):
        list(leaves(endless))


@pytest.mark.parametrize("name", ["a[", "a[x]", "a]", "a.b[0]c[", "a" + "[0]" * 20])
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(StateError, match="is not a name"):
        nested({name: 1})
    with pytest.raises(StateError, match="within what has no parts"):
        nested({"a": 1, "a.b": 2})
