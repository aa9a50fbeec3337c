"""Replicas of what trainers copy whole: parameters and optimizer state of many types."""

from __future__ import annotations

import pytest
import torch

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.replica import IterationGone, Replica, ReplicaError
from checkmate.state import DTYPES
from checkmate.wire.layout import Layout, from_json, make_layout
from checkmate.wire.parameter import LayoutError, Parameter

SPEC = pb.OptimizerSpec(name="some.package.Muon", copied=True)
SPEC.groups.add(parameters=[0, 1], options="{}")
PARAMETERS = [
    Parameter("w", (4, 3), "float32", (1, 0)),
    Parameter("b", (5,), "bfloat16"),
    Parameter("w", (4, 3), "float32", state="momentum"),
    Parameter("w", (7,), "uint8", state="second:codes"),
    Parameter("w", (), "int64", state="step"),
    Parameter("b", (0,), "float32", state="nothing"),
    Parameter("b", (2, 2), "bool", state="masks[0]"),
]
LAYOUT = make_layout(PARAMETERS, 2, bucket_bytes=32)


def buckets(layout: Layout, value: int) -> dict[int, torch.Tensor]:
    """Return all buckets, filled with numbers from `value` on."""
    return {
        index: (torch.arange(bucket.elements) + value).to(DTYPES[bucket.dtype])
        for index, bucket in enumerate(layout.buckets)
    }


def test_a_layout_with_state_comes_back() -> None:
    again = from_json(LAYOUT.to_json())
    assert again == LAYOUT
    assert again.trained == tuple(PARAMETERS[:2])
    assert sorted(n for shard in range(2) for n in again.of_shard(shard)) == list(range(7))
    with pytest.raises(LayoutError, match="w has type int64; gradients may be float64"):
        make_layout([Parameter("w", (), "int64")], 1)
    with pytest.raises(LayoutError, match="w has type complex64; copied state may be"):
        make_layout([Parameter("w", (), "complex64", state="x")], 1)


@pytest.mark.parametrize("shard", [0, 1])
def test_each_iteration_replaces_everything(shard: int) -> None:
    """Also in one that a scaler skips, and of parameters without gradients. Readers keep what they read."""
    replica = Replica(LAYOUT, shard, SPEC, exact=True)
    for number in replica.numbers:
        parameter = LAYOUT.parameters[number]
        replica.load(number, torch.zeros(parameter.memory_shape, dtype=DTYPES[parameter.dtype]), {}, -1)
    assert replica.reserve(0)
    assert replica.reserve(0)  # each is for one reading
    for iteration in range(3):
        step = pb.Step(skipped=iteration == 1, without_gradient=[0, 1])
        assert replica.step(iteration, buckets(LAYOUT, iteration), step) == []
        expected = {
            number: buckets(LAYOUT, iteration)[index][place.start : place.stop]
            for number, (index, place) in LAYOUT.where.items()
        }
        for number, tensor, values in replica.read(iteration):
            assert values == {}
            if number in expected:
                assert torch.equal(tensor.reshape(-1), expected[number])
    first = {number: tensor for number, tensor, _ in replica.read(0)}
    for number, (index, place) in LAYOUT.where.items():
        if number in first:
            assert torch.equal(first[number].reshape(-1), buckets(LAYOUT, 0)[index][place.start : place.stop])
    with pytest.raises(IterationGone):
        list(replica.read(0))
    with pytest.raises(ReplicaError, match="is missing, or has another size or type"):
        replica.step(3, {}, pb.Step())
    assert replica.comparison.exact
