"""PyTorch's own optimizer beside replicas: both get the same gradients, and must have the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from checkmate.optim.supported import options_of, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.replica import Replica
from checkmate.state import bytes_of, dtype_name, to_held
from checkmate.training.record.windows import Window, to_message
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from tests.support.shadow.replicas import iteration_of

SHAPES: list[tuple[int, ...]] = [(40, 30), (), (1,), (7,), (300,), (13, 5, 3), (1000,), (36, 36)]
State = dict[int, tuple[torch.Tensor, dict[str, object]]]


class Trainer:
    """Parameters, PyTorch's optimizer of all of them, and its messages to shadow nodes."""

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        shapes: list[tuple[int, ...]] = SHAPES,
        dtypes: tuple[torch.dtype, ...] = (torch.float32,),
        shards: int = 2,
        groups: int = 2,
        seed: int = 0,
        bucket_bytes: int = 4000,
        turned: bool = False,
    ) -> None:
        """With `turned`, every second parameter has its first dimension innermost in memory."""
        self.random = torch.Generator().manual_seed(seed)
        kinds = itertools.cycle(dtypes)
        self.parameters = [
            nn.Parameter(turn(self.noise(shape, next(kinds)), turned and bool(i % 2)))
            for i, shape in enumerate(shapes)
        ]
        parameters = [
            Parameter.of(f"layer{i}.weight", p.shape, p.stride(), dtype_name(p.dtype))
            for i, p in enumerate(self.parameters)
        ]
        self.layout = make_layout(parameters, shards, bucket_bytes)
        runs = [self.parameters[i::groups] for i in range(groups)]
        self.optimizer = make([{"params": run} for run in runs])
        self.number = {parameter: i for i, parameter in enumerate(self.parameters)}
        self.spec = spec_of(self.optimizer, self.number)
        self.iteration = -1

    def noise(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(dtype)

    def backward(self, without: set[int] = frozenset()) -> dict[int, torch.Tensor]:  # type: ignore[assignment]
        """Set random gradients in `.grad`, and return them in buckets."""
        self.iteration += 1
        flat, by_bucket = {}, {}
        for number, parameter in enumerate(self.parameters):
            gradient = torch.empty_like(parameter, requires_grad=False)
            gradient.copy_(self.noise(tuple(parameter.shape), parameter.dtype))
            parameter.grad = None if number in without else gradient
            layout_tensor, _ = to_held(self.layout.parameters[number], gradient, {})
            flat[number] = layout_tensor.reshape(-1)
        for index, bucket in enumerate(self.layout.buckets):
            by_bucket[index] = torch.cat([flat[place.parameter] for place in bucket.places])
        self.step = pb.Step(without_gradient=without)
        return by_bucket

    def update(self) -> pb.Step:
        """Step the optimizer; return the record with a slice of each parameter and all of its state."""
        self.step.options.extend(options_of(group) for group in self.optimizer.param_groups)
        if not self.step.skipped:
            self.optimizer.step()
        for number, (parameter, state) in self.state().items():
            for name, value in {"": parameter, **state}.items():
                stop = value.numel() if isinstance(value, torch.Tensor) else 1
                copy = value.reshape(-1)[:1024] if isinstance(value, torch.Tensor) else value
                self.step.slices.append(to_message(Window(number, name, 0, min(stop, 1024)), copy))
        return self.step

    def state(self) -> State:
        """Return the expected state of each shadow node."""
        return {
            number: to_held(
                self.layout.parameters[number],
                parameter.detach().clone(),
                copied(self.optimizer.state.get(parameter, {})),
            )
            for number, parameter in enumerate(self.parameters)
        }

    def replica(self, shard: int, *, exact: bool = True, seeded: bool = True) -> Replica:
        replica = Replica(self.layout, shard, self.spec, exact=exact)
        if seeded:
            self.seed(replica, replica.numbers)
        return replica

    def seed(self, replica: Replica, numbers: Any) -> None:
        state = self.state()
        for number in numbers:
            replica.load(number, *state[number], self.iteration)


def turn(tensor: torch.Tensor, really: bool = True) -> torch.Tensor:
    """Return the same values, with the first dimension innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if really and tensor.dim() > 1 else tensor


def copied(state: Mapping[str, object]) -> dict[str, object]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def read(replica: Replica, iteration: int, parameters: tuple[int, ...] = ()) -> State:
    return {n: (t.clone(), copied(s)) for n, t, s in replica.read(iteration, parameters)}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors are bit-identical, including NaNs."""
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and bytes(bytes_of(first)) == bytes(bytes_of(second.contiguous()))


def assert_same(actual: State, expected: State, numbers: Any) -> None:
    assert set(actual) == set(numbers)
    for number, (tensor, state) in actual.items():
        expected_tensor, their_state = expected[number]
        assert same(tensor, expected_tensor), f"parameter {number}"
        assert set(state) == set(their_state), f"parameter {number}"
        for name, value in state.items():
            expected_value = their_state[name]
            if isinstance(value, torch.Tensor) and isinstance(expected_value, torch.Tensor):
                assert same(value, expected_value), f"{name} of parameter {number}"
            else:
                assert value == expected_value


def buckets_of(gradients: Mapping[int, torch.Tensor], replica: Replica) -> dict[int, torch.Tensor]:
    """Return a copy of a shard's gradients, because a shadow node has its own."""
    layout = replica.layout
    return {i: g.clone() for i, g in gradients.items() if layout.buckets[i].shard == replica.shard}


def follow(trainer: Trainer, replicas: list[Replica], gradients: Mapping[int, torch.Tensor]) -> None:
    """Step on both sides, and compare all state."""
    step = trainer.update()
    for replica in replicas:
        assert replica.step(trainer.iteration, buckets_of(gradients, replica), step) == []
        assert iteration_of(replica) == trainer.iteration
        assert_same(read(replica, trainer.iteration), trainer.state(), replica.numbers)


MAKERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda g, **k: torch.optim.SGD(g, lr=0.1, **k),
    "sgd-momentum": lambda g, **k: torch.optim.SGD(g, lr=0.1, momentum=0.9, weight_decay=0.01, **k),
    "sgd-nesterov": lambda g, **k: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True, **k),
    "adam": lambda g, **k: torch.optim.Adam(g, lr=0.01, **k),
    "adam-amsgrad": lambda g, **k: torch.optim.Adam(g, lr=0.01, amsgrad=True, weight_decay=0.1, **k),
    "adamw": lambda g, **k: torch.optim.AdamW(g, lr=0.01, weight_decay=0.1, **k),
    "adamw-maximize": lambda g, **k: torch.optim.AdamW(g, lr=0.01, maximize=True, **k),
}
