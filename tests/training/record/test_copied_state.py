"""Optimizers whose state is copied: what their trial leaves, and that any state comes back bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkmate import state
from checkmate.optim.options import apply_options, options_of
from checkmate.optim.several import SeveralOptimizers, entries_of, members_of
from checkmate.optim.supported import UnsupportedOptimizer
from checkmate.training.errors import RefusedError
from checkmate.training.model.trained import BareModel
from checkmate.training.record import copied_state
from checkmate.training.record.capture import same
from checkmate.training.record.copied_state import CopiedState, copied_state_of
from tests.scripts.any_optimizer import OPTIMIZERS, optimizers_of


class Odd(torch.optim.Optimizer):
    """Keeps state in lists, in dictionaries and in itself, and makes some of it late, or never."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "calls": 0, "dtype": torch.bfloat16})
        self.rounds = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.rounds += 1
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                entries = self.state[parameter]
                if not entries:
                    entries["count"], entries["name"] = 0, "odd"
                    entries["pair"] = [torch.zeros_like(parameter), torch.zeros(3, dtype=torch.int64)]
                    entries["deep"] = {"mask": torch.zeros(parameter.shape, dtype=torch.bool), "none": None}
                    entries["noise"] = torch.rand(2)
                entries["count"] += 1
                entries["pair"][0].add_(parameter.grad)
                entries["pair"][1] += entries["count"]
                entries["deep"]["mask"] = parameter.grad > 0
                entries["turned"] = (parameter.grad * 2).t().contiguous().t()
                if entries["count"] == 4:
                    entries["late"] = parameter.grad.clone()
                    entries["deep"].pop("none")
                scale = 1.0 if "late" in entries else 0.5
                parameter.sub_(entries["pair"][0] * (group["lr"] * scale / self.rounds))


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with an unused layer, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    model.register_module("unused", nn.Linear(4, 4))
    parameters = list(model.parameters())
    made = [Odd(parameters)] if name == "odd" else optimizers_of(name, parameters)
    for member in made:
        getattr(member, "train", bool)()
    return model, made[0] if len(made) == 1 else SeveralOptimizers(made)


def train(model: Any, optimizer: torch.optim.Optimizer, turns: range) -> None:
    for turn in turns:
        data = torch.randn(4, 16, generator=torch.Generator().manual_seed(turn))
        for member in members_of(optimizer):
            member.zero_grad()
        model[:3](data).square().mean().backward()
        for member in members_of(optimizer):
            member.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return parameters, optimizer state by leaves, options and the optimizer's own numbers."""
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "state": [
            {leaf.name: _copy(leaf.value) for leaf in state.leaves(optimizer.state.get(parameter, {}))}
            for parameter in model.parameters()
        ],
        "options": [options_of(group) for group in optimizer.param_groups],
        "strides": [
            {
                leaf.name: leaf.value.stride()
                for leaf in state.leaves(entries)
                if hasattr(leaf.value, "stride")
            }
            for entries in (optimizer.state.get(parameter, {}) for parameter in model.parameters())
        ],
        "rounds": getattr(optimizer, "rounds", 0),
    }


REAL = [
    pytest.param(name, marks=[] if name in ("muon", "adafactor") else pytest.mark.slow)
    for name in OPTIMIZERS
    if name != "spread"  # over several ranks
]


@pytest.mark.parametrize("name", ["odd", *REAL])
def test_any_state_comes_back_bit_for_bit(name: str) -> None:
    """As by nodes: of 5 steps, into a script that has just begun, and again from a checkpoint on disk."""
    try:
        model, optimizer = build(name)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    copied = CopiedState(BareModel(model), optimizer)
    train(model, optimizer, range(5))
    copied.look()
    tensors = {
        number: copied.value(number).clone(memory_format=torch.contiguous_format)
        for number in range(len(copied.described))
    }
    flats = [copied.flat(number) for number in range(len(tensors))]
    for flat, tensor, described in zip(flats, tensors.values(), copied.described, strict=True):
        assert flat is None or same(flat, state.in_memory_order(tensor, described.dim_order).reshape(-1))
    beside = state.loads(copied.beside)
    assert beside["stateless"] == [4, 5]
    expected = everything(model, optimizer)
    options = [options_of(group) for group in optimizer.param_groups]
    of_disk = [
        state.nested({leaf.name: _copy(leaf.value) for leaf in state.leaves(optimizer.state.get(p, {}))})
        for p in model.parameters()
    ]

    def from_nodes(into: CopiedState) -> None:
        into.install(tensors, beside)

    def from_disk(into: CopiedState) -> None:
        into.install_parameters(tensors)
        into.install_states(of_disk, beside.get("counters", ()))

    train(model, optimizer, range(5, 9))
    for restore in (from_nodes, from_disk):
        another_model, another = build(name)
        into = CopiedState(BareModel(another_model), another)
        assert into.described == copied.described
        restore(into)
        for group, text in zip(another.param_groups, options, strict=True):
            apply_options(group, text)
        assert same(everything(another_model, another), expected)
        train(another_model, another, range(5, 9))
        assert same(everything(another_model, another), everything(model, optimizer))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_a_trial_leaves_no_trace() -> None:
    model, optimizer = build("odd")
    calls: list[object] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, range(3))
    gradients = [parameter.grad for parameter in model.parameters()]
    entries = dict(optimizer.state)
    before = everything(model, optimizer), len(calls)
    draws = [(torch.get_rng_state(), random.getstate(), np.random.get_state())]
    CopiedState(BareModel(model), optimizer)
    draws.append((torch.get_rng_state(), random.getstate(), np.random.get_state()))
    assert same((everything(model, optimizer), len(calls)), before)
    assert all(optimizer.state[parameter] is value for parameter, value in entries.items())
    assert [parameter.grad for parameter in model.parameters()] == gradients
    assert torch.equal(draws[0][0], draws[1][0])
    assert draws[0][1] == draws[1][1]
    assert same(draws[0][2], draws[1][2])


class Counting(Odd):
    """Makes a number of its own in its first step, and moves a table to the parameters' device."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.table = {"map": torch.ones(3)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.table["map"] = self.table["map"].clone()
        self.calls = getattr(self, "calls", 0) + 1


def test_numbers_of_the_optimizer_itself_come_back() -> None:
    model, _ = build("odd")
    optimizer = Counting(model.parameters())
    copied = CopiedState(BareModel(model), optimizer)
    assert (optimizer.rounds, hasattr(optimizer, "calls")) == (0, False)
    train(model, optimizer, range(3))
    copied.look()
    assert state.loads(copied.beside)["counters"] == [{"rounds": 3, "calls": 3}]
    tensors = {number: copied.value(number).clone() for number in range(len(copied.described))}
    again = Counting(model.parameters())
    CopiedState(BareModel(model), again).install(tensors, state.loads(copied.beside))
    assert (again.rounds, again.calls) == (3, 3)


def test_what_is_noted_does_not_change_with_later_steps() -> None:
    model, optimizer = build("odd")
    copied = CopiedState(BareModel(model), optimizer)
    train(model, optimizer, range(5))  # with state that the trial did not make
    copied.look()
    noted, flat = copied.beside, copied.flat(0)
    assert flat is not None
    train(model, optimizer, range(5, 6))
    assert copied.beside == noted
    copied.look()
    assert copied.beside != noted


def test_state_beside_tensors_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_state, "MAX_BESIDE", 1000)
    model, optimizer = build("odd")
    copied = CopiedState(BareModel(model), optimizer)
    train(model, optimizer, range(5))
    with pytest.raises(state.StateError, match="the largest is late of 0.weight"):
        copied.look()


def test_a_parameter_of_another_type_is_named() -> None:
    model, optimizer = build("muon")
    copied = CopiedState(BareModel(model), optimizer)
    model.half()
    with pytest.raises(state.StateError, match="0.weight has another shape or type than at the start"):
        copied.look()


def test_frozen_parameters_of_several_optimizers_get_their_state() -> None:
    """`SeveralOptimizers` itself never makes an entry."""
    model, optimizer = build("muon")
    parameter = next(model.parameters())
    entries_of(optimizer, parameter)["more"] = 1
    assert members_of(optimizer)[0].state[parameter]["more"] == optimizer.state[parameter]["more"] == 1


class Hiding(Odd):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.average = [torch.ones(2)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.average = [item * 0.9 for item in self.average]


class Writing(Odd):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.power = torch.ones(1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.power.data.mul_(0.9)


class Rebinding(Writing):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Odd.step(self, closure)
        self.power = self.power * 0.9


class Drawing(Odd):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.generator = torch.Generator()
        self.generator.manual_seed(0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        torch.rand(1, generator=self.generator)


class Wrapping(Odd):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)


class Composing(Odd):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.optimizers = [torch.optim.Adam(self.param_groups)]


class Sharing(Odd):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.state = self.inner.state


class Showing(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)


class Asking(Odd):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


class Opaque(Odd):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for entries in self.state.values():
            entries["thing"] = object()


class Packing(Odd):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for entries in self.state.values():
            entries["tuple"] = (torch.ones(2), 3)


class Alike(Odd):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for entries in self.state.values():
            entries.update({"a.b": torch.ones(2), "a_b": torch.ones(2)})


ANOTHER = "wraps another optimizer, "


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Hiding, "Hiding: its state can't be copied.*keeps average outside of its `state`"),
        (Writing, "keeps power outside of its `state`"),
        (Rebinding, "keeps power outside of its `state`"),
        (Drawing, "keeps generator outside of its `state`"),
        (Wrapping, f"Wrapping {ANOTHER}in inner, whose own state would not be copied"),
        (Composing, f"Composing {ANOTHER}in optimizers, whose own"),
        (Sharing, f"Sharing {ANOTHER}in inner, whose own"),
        (Showing, f"Showing {ANOTHER}whose state it shows as its own"),
        (Asking, "trial of its step, with zeros as gradients, fails: TypeError"),
        (Opaque, "thing of the optimizer state: only tensors"),
        (Packing, r"tuple\[1\], is a number in a tuple"),
        (Alike, "two entries whose names are alike"),
        (torch.optim.LBFGS, "LBFGS can't be followed, nor its state be copied"),
    ],
)
def test_what_cant_be_copied_is_refused(make: Callable[[Any], torch.optim.Optimizer], words: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    before = dict(optimizer.state)
    with pytest.raises((UnsupportedOptimizer, state.StateError), match=words):
        CopiedState(BareModel(model), optimizer)
    assert dict(optimizer.state) == before


def test_state_that_has_no_place_is_refused() -> None:
    model, optimizer = build("muon")
    copied = CopiedState(BareModel(model), optimizer)
    tensors = {number: copied.value(number) for number in range(len(copied.described))}
    with pytest.raises(state.StateError, match=r"x\[0\] of the optimizer state of 0.weight has no place"):
        copied.install(tensors, {"values": {0: {"x[0]": 1}}})


CHOICES: Mapping[tuple[str, str, str], bool | str] = {
    ("adamw", "auto", "host"): False,
    ("adamw", "gradients", "host"): False,
    ("adamw", "state", "host"): True,
    ("adamw", "state", "switch"): "needs copies by hosts",
    ("muon", "auto", "host"): True,
    ("muon", "state", "host"): True,
    ("muon", "gradients", "host"): "or have its state copied, which follow='auto' does",
    ("muon", "auto", "switch"): "or have its state copied, which a job with copies: host does",
    ("muon", "copies", "host"): "must be one of 'auto', 'gradients', 'state'",
}


@pytest.mark.parametrize(("name", "follow", "copies"), CHOICES)
def test_nodes_repeat_steps_if_they_can(name: str, follow: Any, copies: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = {"adamw": torch.optim.AdamW, "muon": torch.optim.Muon}[name](model.parameters(), lr=0.1)
    expected = CHOICES[name, follow, copies]
    if isinstance(expected, str):
        with pytest.raises((RefusedError, UnsupportedOptimizer), match=expected):
            copied_state_of(BareModel(model), optimizer, follow, copies)
        return
    copied = copied_state_of(BareModel(model), optimizer, follow, copies)
    assert (copied is not None) == expected
