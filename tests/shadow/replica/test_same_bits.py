"""Replicas of any model, sharded and cut in any way, against torch's own steps: all bits of all state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from checkmate.shadow.replica import blocks
from checkmate.shadow.replica.replica import Replica
from checkmate.state import bytes_of
from tests.support.training.any_training import (
    AnyTraining,
    Iteration,
    ParameterPlan,
    State,
    TrainingPlan,
    plans,
)

SCALAR, VECTOR = ParameterPlan((), "float32", (), 0), ParameterPlan((3,), "float64", (0,), 0)


def follow(plan: TrainingPlan, seed: int = 0) -> None:
    """Train as planned, with replicas from some iteration on, and compare them after each."""
    training = AnyTraining(plan, seed)
    replicas: list[Replica] = []
    for iteration in range(len(plan.iterations)):
        if iteration == plan.seeded:
            replicas = [seeded(training, shard) for shard in range(plan.shards)]
        gradients, step = training.iterate()
        expected = training.state()
        for replica in replicas:
            parameters = {
                i: g.clone()
                for i, g in gradients.items()
                if training.layout.buckets[i].shard == replica.shard
            }
            assert replica.step(iteration, parameters, step) == []
            state_read = {n: (t, s) for n, t, s in replica.read(iteration)} if replica.numbers else {}
            assert_same(state_read, {number: expected[number] for number in replica.numbers})


def seeded(training: AnyTraining, shard: int) -> Replica:
    replica = Replica(training.layout, shard, training.spec, exact=True)
    state = training.state()
    for number in replica.numbers:
        replica.load(number, *state[number], training.iteration)
    return replica


def assert_same(actual: State, expected: State) -> None:
    """Compare types, shapes and bits."""
    assert actual.keys() == expected.keys()
    for number, (tensor, entries) in actual.items():
        expected_tensor, their_entries = expected[number]
        assert entries.keys() == their_entries.keys(), f"parameter {number}"
        values = {"": (tensor, expected_tensor)} | {
            name: (value, their_entries[name]) for name, value in entries.items()
        }
        for name, (actual_value, expected_value) in values.items():
            assert described(actual_value) == described(expected_value), (
                f"{name or 'the values'} of parameter {number}"
            )


def described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bytes(bytes_of(value.contiguous()))
    return type(value), value


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", (64, 64))


def test_a_scalar_beside_a_wider_type_is_clipped_as_a_scalar() -> None:
    """The coefficient is a float64 tensor: the product with a scalar is rounded once, with a vector twice."""
    plan = TrainingPlan(
        (SCALAR, VECTOR), "torch.optim.AdamW", ({"lr": 0.1},), {}, (Iteration(clipped=(0, 1)),) * 4
    )
    for seed in range(12):
        follow(plan, seed)


def scaled(
    name: str, options: dict[str, object], flags: dict[str, bool], *iterations: Iteration
) -> TrainingPlan:
    """Two parameters of 16 bits, one of them a scalar, and a wider one; on two shards."""
    small_parameters = (
        ParameterPlan((), "bfloat16", (), 0),
        ParameterPlan((65,), "bfloat16", (0,), 0),
        VECTOR,
    )
    return TrainingPlan(small_parameters, f"torch.optim.{name}", (options,), flags, iterations, shards=2)


NAMED_TWICE = scaled("SGD", {"lr": 0.1}, {}, Iteration(clipped=(0, 1, 2, 2)))
SKIPPED = replace(scaled("AdamW", {"lr": 0.1}, {"fused": True}, Iteration(infinite=True)), scaled=True)
WIDE = replace(scaled("ASGD", {"lr": 0.1, "t0": 1.0}, {}, *[Iteration()] * 3), default="float64")
BEGINNING = scaled(
    "SGD", {"lr": 0.1, "momentum": 0.9}, {"foreach": True}, Iteration(without=frozenset({0})), Iteration()
)


@example(NAMED_TWICE)
@example(SKIPPED)
@example(WIDE)
@example(BEGINNING)
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_all_state_of_any_training_has_the_same_bits(plan: TrainingPlan) -> None:
    follow(plan)
