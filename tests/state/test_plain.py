"""Plain state as bytes and back: what it was, or one clear error; and nothing else is ever built."""

from __future__ import annotations

import collections
import io
import itertools
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkmate.state import StateError, dumps, loads
from checkmate.state.plain import _DTYPES, _KINDS, MAX_DEPTH, MAX_TEXT
from checkmate.training.record.capture import same
from tests.state.test_state import NUMBERS, tensors

KEYS = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.none()
LEAVES = (
    NUMBERS
    | st.integers()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers()
    | tensors()
    | st.sampled_from(
        [torch.Size([2, 3]), torch.float16, torch.device("cpu"), bytearray(b"x"), {1}, "\ud800"]
    )
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(collections.Counter)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(PLAIN)
def test_it_comes_back(obj: object) -> None:
    restored = loads(dumps(obj))
    assert same(restored, obj)
    assert str(restored) == str(obj)  # the order of keys, too


def test_long_lists_and_numbers_come_back_or_are_refused_at_once() -> None:
    inner: list[int] = [1] * 1000
    for obj in (1 << 62, -(1 << 2040), [inner] * 1000, list(range(1_000_000))):
        assert loads(dumps(obj)) == obj
    nested: list[object] = []
    doubled: list[object] = [0]
    itself: list[object] = []
    itself.append(itself)
    for _ in range(MAX_DEPTH + 1):
        nested, doubled = [nested], [doubled, doubled]
    for wrong, words in (
        (10**5000, "can't be stored: Exceeds the limit"),
        (nested, "nested more than 64 deep"),
        (itself, "nested more than 64 deep"),
        ([0] * (MAX_TEXT // 2 + 1), "more than 64 MiB of numbers and names"),
        (["x" * 1000] * (MAX_TEXT // 1000), "more than 64 MiB of numbers and names"),
        (doubled[0], "nested more than 64 deep|more than 64 MiB"),
    ):
        with pytest.raises(StateError, match=words):
            dumps(wrong)
    deepest: object = 1
    for _ in range(MAX_DEPTH - 1):
        deepest = (deepest,)
    assert loads(dumps({deepest: 1})) == {deepest: 1}


class _Own:
    pass


class _OwnTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (_Own(), "and this is a _Own"),
        ({"f": [1, lambda: 1]}, r"and \['f'\]\[1\] is a function"),
        ([itertools.count()], r"\[0\] is a count"),
        (collections.defaultdict(int), "is a defaultdict"),
        (torch.zeros(2).as_subclass(_OwnTensor), "is a _OwnTensor"),
        (np.array(["a"]), "is a ndarray"),
        (np.zeros(1, dtype=[("a", "i4")]), "is a ndarray"),
        (torch.eye(2).to_sparse(), "sparse_coo can't be stored: give its parts"),
        (torch.zeros(2, device="meta"), "can't be stored"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_place(obj: object, words: str) -> None:
    with pytest.raises(StateError, match=words):
        dumps(obj)


@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=str)
def test_every_type_of_tensor_comes_back(dtype: torch.dtype) -> None:
    bits = torch.arange(64, dtype=torch.uint8) % 2
    tensor = bits.view(dtype)
    assert same(loads(dumps(tensor)), tensor)


def test_tensors_keep_order_in_memory_sharing_and_gradients() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weight = nn.Parameter(torch.randn(3, 3))
    document = {
        "image": image,
        "turned": torch.randn(3, 5).t(),
        "some": torch.arange(10)[::3],
        "expanded": torch.ones(1).expand(4),
        "one": torch.tensor(5.0),
        "none": torch.empty(0, 3),
        "embedding": weight,
        "head": weight,
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "imaginary": torch.randn(3, dtype=torch.complex64).conj(),
    }
    restored = loads(data := dumps(document))
    assert same({**restored}, document)
    assert restored["image"].stride() == image.stride()
    assert restored["turned"].stride() == document["turned"].stride()
    restored["image"].zero_()
    with torch.no_grad():
        restored["embedding"].fill_(7)
    assert bool((restored["head"] == 7).all()), "tied weights stay tied"
    assert [type(restored[name]) for name in ("embedding", "frozen", "leaf")] == [nn.Parameter] * 2 + [
        torch.Tensor
    ]
    assert [restored[name].requires_grad for name in ("embedding", "frozen", "leaf")] == [True, False, True]
    assert len(data) < 2000  # what is shared is there once
    assert float(loads(data)["image"].abs().sum()) > 0  # nothing shares memory with the bytes


def test_numpy_values_come_back() -> None:
    document = {
        "lr": np.float64(0.1),
        "truth": np.bool_(True),
        "counts": np.arange(3, dtype=np.uint32),
        "turned": np.arange(6.0).reshape(2, 3).T,
        "other order": np.arange(3, dtype=">i4"),
        "nothing": np.zeros((0, 2)),
        "one": np.array(1 + 2j),
    }
    restored = loads(dumps(document))
    assert same(restored, document)
    assert type(restored["lr"]) is np.float64
    assert restored["turned"].flags.f_contiguous
    restored["counts"][0] = 5


@given(st.binary(max_size=200))
def test_garbage_is_no_state(data: bytes) -> None:
    with pytest.raises(StateError, match="unreadable state"):
        loads(data)


def test_damaged_state_never_crashes() -> None:
    whole = dumps({"a": torch.arange(3), "b": [1, (2.0, "x")], "c": np.arange(2), 3: {4}})
    for at in range(len(whole)):
        for flip in (1, 2, 16, 128, 255):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            try:
                loads(bytes(damaged))
            except StateError as error:
                assert str(error).startswith("unreadable state")
        for part in (whole[:at], whole[at:] if at else b""):
            with pytest.raises(StateError):
                loads(part)


def crafted(value: object, *blobs: bytes, sizes: object = None) -> bytes:
    """Return bytes as somebody might write them who has a trainer's key."""
    text = json.dumps({"blobs": [len(blob) for blob in blobs] if sizes is None else sizes, "value": value})
    return b"CMS1" + struct.pack("<I", len(text)) + text.encode() + b"".join(blobs)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 70)
    | st.floats()
    | st.sampled_from([*_KINDS, *_DTYPES, "<f4"]),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from([*_KINDS, "x"]), inner, max_size=2)
    ),
    max_leaves=20,
)


@settings(max_examples=500)
@given(JSON)
def test_no_text_builds_anything_else(value: object) -> None:
    try:
        restored = loads(crafted(value, b"\0" * 8, b"12345678"))
    except StateError as error:
        assert str(error).startswith("unreadable state")
    else:
        dumps(restored)  # plain, all of it


def nested(kind: str, times: int) -> Any:
    value: Any = 1
    for _ in range(times):
        value = [value] if kind == "list" else {kind: [value]}
    return value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (crafted(nested("list", 66)), "nested more than 64 deep"),
        (crafted({"pairs": [[nested("tuple", 400), 1]]}), "nested more than 64 deep"),
        (b"CMS1" + struct.pack("<I", 400_000) + b"[" * 400_000, "recursion|Recursion"),
        (crafted({"array": ["|O", [1], "C", 0]}, b"\0" * 8), "a type of NumPy is none of numbers"),
        (crafted({"array": ["i4,O", [1], "C", 0]}, b"\0" * 12), "a type of NumPy is none of numbers"),
        (crafted({"scalar": ["|b1", "02"]}), "a truth value is neither 0 nor 1"),
        (crafted({"tensor": ["bool", [1], [], 0, 0]}, b"\2"), "a truth value is neither 0 nor 1"),
        (crafted({"tensor": ["float32", [1 << 62, 4], [], 0, 0]}, b"\0" * 4), "a shape is none"),
        (crafted({"tensor": ["float32", [2], [], 0, 0]}, b"\0" * 4), "shape"),
        (crafted({"tensor": ["float32", [-1], [], 0, 0]}, b"\0" * 4), "a shape is none"),
        (crafted({"tensor": ["float32", [1, 1], [0, 0], 0, 0]}, b"\0" * 4), "no order"),
        (crafted({"tensor": ["float32", [1], [], 1, 0]}, b"\0" * 4), "list index out of range"),
        (crafted({"tensor": ["float32", [1], [], -1, 0]}, b"\0" * 4), "a blob that is not there"),
        (crafted({"bytes": 0}, sizes=[1 << 40]), "its blobs have other sizes"),
        (crafted({"bytes": 0}, b"1234", sizes=[2]), "its blobs have other sizes"),
        (crafted({"eval": "1"}), "eval"),
        (b"CMS1\xff\xff\xff\xff", "its text is too long"),
    ],
)
def test_crafted_state_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(StateError, match=words):
        loads(data)


def test_one_blob_is_in_memory_once() -> None:
    """Else a message of 1 MB could take as much memory as it likes."""
    restored = loads(
        crafted([{"bytes": 0}, {"bytes": 0}, *[{"tensor": ["uint8", [4], [], 0, 0]}] * 3], b"1234")
    )
    assert restored[0] is restored[1]
    assert len({tensor.data_ptr() for tensor in restored[2:]}) == 1


def test_an_archive_of_torch_is_refused_unread() -> None:
    """Its pickle could give NumPy's types a state of its own, and nest what overflows the stack."""
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer)
    with pytest.raises(StateError, match="it does not begin as Checkmate's state does"):
        loads(buffer.getvalue())


def test_no_number_is_lost() -> None:
    for number in (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 0.1 + 0.2):
        assert str(loads(dumps(number))) == str(number)
