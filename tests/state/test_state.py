"""State as messages and back: every bit, every type; damaged data is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate import state as module
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import (
    DTYPES,
    PIECE_BYTES,
    SeedReader,
    StateError,
    bytes_of,
    dump_generators,
    dumps,
    frozen_parameter,
    frozen_states,
    is_frozen_state,
    load_generators,
    loads,
    name_frozen,
    to_seeds,
)
from checkmate.training.record.generators import capture_generators, install_generators

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Draw tensors of any type with any bits: also NaNs with a payload, infinities and negative zeros."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(SHAPES) if shape is None else shape
    tensor = torch.zeros(shape, dtype=dtype)
    data = bytes_of(tensor)
    data[:] = draw(st.binary(min_size=len(data), max_size=len(data)))
    return tensor.view(torch.uint8).bitwise_and(1).bool() if dtype is torch.bool and len(data) else tensor


NUMBERS = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats()
ENTRIES = st.dictionaries(st.text(min_size=1, max_size=8), NUMBERS | tensors() | tensors(()), max_size=4)
PARAMETERS = st.dictionaries(st.integers(0, 0xFFFFFFFE), st.tuples(tensors(), ENTRIES), max_size=4)


def same(first: object, second: object) -> bool:
    """Compare types and bits."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (first.dtype, first.shape) == (second.dtype, second.shape) and bytes(bytes_of(first)) == bytes(
            bytes_of(second)
        )
    if isinstance(first, float) and math.isnan(first):
        return isinstance(second, float) and math.isnan(second)
    return type(first) is type(second) and first == second and str(first) == str(second)  # -0.0 is not 0.0


def header_of(parameters: dict[int, tuple[torch.Tensor, dict[str, object]]]) -> pb.SeedHeader:
    header = pb.SeedHeader(job="demo", incarnation=7, iteration=41, parameters=parameters)
    header.shard.CopyFrom(pb.Shard(group=1, shard=2))
    return header


def send(parameters: dict[int, tuple[torch.Tensor, dict[str, object]]]) -> list[pb.Seeds]:
    """Convert through bytes, like a connection."""
    messages = to_seeds(header_of(parameters), ((n, t, s) for n, (t, s) in parameters.items()))
    return [pb.Seeds.FromString(message.SerializeToString()) for message in messages]


@given(PARAMETERS)
def test_everything_comes_back_bit_for_bit(
    parameters: dict[int, tuple[torch.Tensor, dict[str, object]]],
) -> None:
    reader = SeedReader(send(parameters))
    assert reader.header == header_of(parameters)
    states_read = reader.read_all(None)
    assert list(states_read) == list(parameters)
    for number, (tensor, state) in parameters.items():
        tensor_read, got_state = states_read[number]
        assert same(tensor, tensor_read)
        assert list(got_state) == list(state)
        assert all(same(state[name], got_state[name]) for name in state)


@given(PARAMETERS.filter(bool), st.data())
def test_a_message_that_is_lost_doubled_moved_or_changed_is_noticed(
    parameters: dict[int, tuple[torch.Tensor, dict[str, object]]], data: st.DataObject
) -> None:
    messages = send(parameters)
    at = data.draw(st.integers(0, len(messages) - 1))
    damage = data.draw(st.sampled_from(["lose", "double", "swap", "change"]))
    damaged = [pb.Seeds.FromString(m.SerializeToString()) for m in messages]
    if damage == "lose":
        del damaged[at]
    elif damage == "double":
        damaged.insert(at, damaged[at])
    elif damage == "swap":
        swapped = data.draw(st.integers(0, len(messages) - 1).filter(lambda i: i != at))
        damaged[at], damaged[swapped] = damaged[swapped], damaged[at]
        if damaged == messages:
            return
    else:
        raw = bytearray(damaged[at].SerializeToString())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        try:
            damaged[at] = pb.Seeds.FromString(bytes(raw))
        except Exception:  # noqa: BLE001 - protobuf's DecodeError: the connection would have ended here
            return
        if damaged[at] == messages[at]:
            return
    with pytest.raises(StateError):
        SeedReader(damaged).read_all(None)


def test_pieces_are_small_and_in_order() -> None:
    tensor = torch.arange(PIECE_BYTES // 4 * 3 + 5, dtype=torch.float32)
    states: dict[str, object] = {"step": torch.tensor(4.0), "momentum_buffer": None, "n": 2}
    pieces = [message.piece for message in send({3: (tensor, states)})[1:-1]]
    assert [len(p.tensor.data) for p in pieces[:4]] == [PIECE_BYTES] * 3 + [20]
    assert [p.tensor.offset for p in pieces[:4]] == [0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES]
    assert [p.state for p in pieces[4:]] == ["step", "momentum_buffer", "n"]
    assert max(len(p.SerializeToString()) for p in pieces) < PIECE_BYTES + 100


def test_views_and_parameters_are_read_as_they_look() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    parameter = torch.nn.Parameter(base.t())
    ((_, tensor_read, _),) = SeedReader(send({0: (parameter, {})})).read(None)
    assert torch.equal(tensor_read, base.t())
    assert tensor_read.is_contiguous()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m[1:], "begins with its header"),
        (lambda m: m[:-1], "ended before its checksum"),
        (lambda m: [*m, m[-1]], "follows the checksum"),
        (lambda m: [*m[:2], pb.Seeds(), *m[2:]], "without a kind"),
        (lambda m: [m[0], *m[2:]], "does not begin with its first bytes"),
        (lambda m: [*m[:2], *m[3:]], "has a gap"),
        (lambda m: [*m[:3], *m[4:]], "momentum_buffer, does not begin|missing|checksum"),
        (lambda m: [*m[:1], *m[3:]], "wrong checksum"),
    ],
)
def test_faults_are_said(change: Callable[[list[pb.Seeds]], list[pb.Seeds]], words: str) -> None:
    tensor = torch.zeros(PIECE_BYTES // 4 + 1)
    messages = send({0: (tensor, {"momentum_buffer": torch.ones(3)})})
    with pytest.raises(StateError, match=words):
        SeedReader(change(messages)).read_all(None)


def test_a_stranger_is_refused() -> None:
    messages = send({0: (torch.zeros(3), {}), 1: (torch.ones(3), {})})
    messages[0].header.parameters[:] = [0]
    with pytest.raises(StateError, match="parameter 1 was not announced"):
        SeedReader(messages).read_all(None)
    messages[0].header.parameters[:] = [0, 1, 2]
    with pytest.raises(StateError, match="wrong checksum"):
        SeedReader(messages).read_all(None)


def test_what_can_not_be_sent_is_named() -> None:
    with pytest.raises(StateError, match="history of the optimizer state is neither"):
        send({0: (torch.zeros(1), {"history": [1, 2]})})
    with pytest.raises(StateError, match="complex64"):
        send({0: (torch.zeros(1, dtype=torch.complex64), {})})


def test_random_states_come_back() -> None:
    """States of used generators, from the message and from its earlier result."""
    random.gauss(0, 1)  # keeps a second value
    np.random.normal()
    captured = capture_generators()
    expected = torch.rand(3), [random.gauss(0, 1), random.random()], np.random.normal(size=3)
    data = dump_generators(captured | {"cuda": torch.arange(16, dtype=torch.uint8)})
    for _ in range(2):
        generators = load_generators(data)
        assert generators["cuda"].tolist() == list(range(16))
        install_generators(generators | {"cuda": None})
        assert torch.equal(torch.rand(3), expected[0])
        assert [random.gauss(0, 1), random.random()] == expected[1]
        assert (np.random.normal(size=3) == expected[2]).all(None)
        data = dump_generators(generators)


@given(st.binary(max_size=40), st.booleans())
def test_random_states_that_are_not_there_are_not_made_up(words: bytes, has_torch: bool) -> None:
    generators = load_generators(
        dump_generators({"torch": torch.tensor(list(words), dtype=torch.uint8)} if has_torch else {})
    )
    assert generators.keys() == {"cuda"} | ({"torch"} if has_torch and words else set())
    assert generators["cuda"] is None
    with pytest.raises(StateError, match="unreadable states of random generators"):
        load_generators(b"\xff" + words)


def test_every_gradient_type_is_there() -> None:
    from checkmate.wire.parameter import ITEMSIZES  # noqa: PLC0415

    assert set(ITEMSIZES) <= set(module.DTYPES)
    assert {name: module.DTYPES[name].itemsize for name in ITEMSIZES} == ITEMSIZES


@given(st.dictionaries(st.integers(0, 1000), ENTRIES.filter(bool), max_size=3), st.text(max_size=9))
def test_state_of_frozen_parameters_comes_back_from_among_the_buffers(
    states: dict[int, dict[str, object]], parameter: str
) -> None:
    buffers = {
        "body.0.running_mean": torch.ones(3),
        "optimizer": torch.ones(2),
        "optimizer.state": torch.ones(1),
    }
    assert not any(map(is_frozen_state, buffers))
    for index, entries in states.items():
        state_by_name = dict(name_frozen(index, entries, parameter))
        assert {frozen_parameter(name) for name in state_by_name} == {parameter}
        buffers.update((name, loads(dumps(tensor))) for name, tensor in state_by_name.items())
    assert sum(map(is_frozen_state, buffers)) == sum(map(len, states.values()))
    back = frozen_states(dict(reversed(buffers.items())))
    assert back.keys() == states.keys()
    for index, entries in states.items():
        assert [*back[index]] == [*entries]
        assert all(same(back[index][name], value) for name, value in entries.items())


def test_state_of_frozen_parameters_that_is_no_number_is_refused() -> None:
    with pytest.raises(StateError, match="history of the optimizer state is neither .* but a list"):
        list(name_frozen(3, {"history": [1, 2]}))
