"""Optimizers described and rebuilt: options are exact to the last bit; unsupported ones are refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from checkmate.optim.options import OptionsError, apply_options, options_of, parse_options
from checkmate.optim.supported import (
    FROZEN,
    SUPPORTED,
    UnsupportedOptimizer,
    beginnings,
    build,
    default_dtype,
    spec_of,
)
from checkmate.rpc import shadow_pb2 as pb

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.floats(width=32).map(np.float32)
    | st.floats().map(np.float64)
    | st.integers(-5, 5).map(np.int64)
    | st.builds(
        lambda value, dtype: torch.tensor(value, dtype=dtype),
        st.floats(width=16),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    )
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.tuples(v, v), max_leaves=5)


def same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first.nan_to_num(7), second.nan_to_num(7))
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, (float, np.floating)) and math.isnan(first):
        return math.isnan(second)
    return bool(first == second) and str(first) == str(second)


@given(st.dictionaries(st.text(max_size=8).filter(lambda k: k not in ("params", "param_names")), VALUES))
def test_options_come_back_with_type_and_bits(group: dict[str, Any]) -> None:
    parsed = parse_options(options_of({**group, "params": [1, 2], "param_names": ["a"]}))
    assert list(parsed) == list(group)
    assert all(same(group[key], parsed[key]) for key in group)


def test_options_are_put_into_a_group_that_keeps_its_parameters() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    group: dict[str, Any] = {
        "params": [nn.Parameter(torch.ones(2))],
        "lr": lr,
        "betas": (0.9, 0.99),
        "own": 1,
    }
    before = group["params"]
    stored_group = {"params": [], "lr": torch.tensor(0.25, dtype=torch.float64), "betas": (0.5, 0.75)}
    apply_options(group, options_of(stored_group))
    assert group["params"] is before
    assert group["lr"] is lr  # a compiled step or a scheduler refers to this tensor
    assert (lr.item(), group["betas"], group["own"]) == (0.25, (0.5, 0.75), 1)
    apply_options(group, options_of({"lr": torch.tensor(0.5)}))
    assert (group["lr"].dtype, lr.item()) == (torch.float32, 0.25)


@pytest.mark.parametrize(
    "text", ["", "[]", "1", '{"lr": {"float": "1"}}', '{"lr": {"tensor": {}}}', '{"a": {}}']
)
def test_a_text_that_is_no_options_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match="not a parameter group's options"):
        parse_options(text)


def test_an_option_that_can_not_be_kept_is_named() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [parameter], "tags": {1, 2}}], lr=0.1)
    with pytest.raises(UnsupportedOptimizer, match="parameter group 0: option 'tags' is of type set"):
        spec_of(optimizer, {parameter: 0})


def two_groups(kind: Any, **options: Any) -> tuple[list[nn.Parameter], Any]:
    parameters = [nn.Parameter(torch.randn(3, 2)) for _ in range(4)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.25, "weight_decay": 0.5}]
    return parameters, kind(groups, **options)


FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, implementation) for name in SUPPORTED for implementation in ("foreach", "neither")]
    + [(f"torch.optim.{name}", "fused") for name in FUSED],
)
def test_the_same_optimizer_is_built_again(name: str, implementation: str) -> None:
    kind = SUPPORTED[name]
    flags = {"fused": True} if implementation == "fused" else {"foreach": implementation == "foreach"}
    parameters, optimizer = two_groups(kind, **flags)
    spec = pb.OptimizerSpec.FromString(
        spec_of(optimizer, {p: i + 10 for i, p in enumerate(parameters)}).SerializeToString()
    )
    assert [list(group.parameters) for group in spec.groups] == [[10], [11, 12, 13]]
    tensors = {10: torch.ones(3, 2), 13: torch.zeros(6)}
    copy = build(spec, tensors)
    assert type(copy) is kind
    for group, group_before, numbers in zip(
        copy.param_groups, optimizer.param_groups, ([10], [13]), strict=True
    ):
        assert [id(p) for p in group["params"]] == [id(tensors[i]) for i in numbers]
        assert {**group, "params": 0} == {**group_before, "params": 0}


def test_groups_without_a_parameter_of_the_shard_are_left_out() -> None:
    parameters, optimizer = two_groups(torch.optim.Adam)
    spec = spec_of(optimizer, {p: i for i, p in enumerate(parameters)})
    (group,) = build(spec, {2: torch.ones(1)}).param_groups
    assert group["lr"] == 0.25
    with pytest.raises(ValueError, match="none of these parameters"):
        build(spec, {7: torch.ones(1)})


def test_names_are_kept_beside_the_options() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    spec = spec_of(optimizer, {p: i for i, p in enumerate(model.parameters())})
    assert list(spec.groups[0].names) == ["weight", "bias"]
    assert "param" not in spec.groups[0].options


def test_parameters_that_training_does_not_reduce() -> None:
    trained, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    spec = spec_of(torch.optim.SGD([frozen, trained], lr=0.1), {trained: 0})
    assert list(spec.groups[0].parameters) == [FROZEN, 0]
    with pytest.raises(UnsupportedOptimizer, match="shape \\(3,\\) that the model does not have.* fp32 copy"):
        spec_of(torch.optim.SGD([trained, nn.Parameter(torch.ones(3))], lr=0.1), {trained: 0})


class _Own(torch.optim.AdamW):
    pass


class _Strange(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            torch.optim.LBFGS,
            "LBFGS is not supported: its step couples all parameters .* use one of SGD, Adam",
        ),
        (torch.optim.SparseAdam, "sparse gradients"),
        (torch.optim.Adafactor, "number of threads"),
        (torch.optim.Muon, "number of threads"),
        (
            lambda p: torch.optim.SGD(
                [nn.Parameter(x.detach().bfloat16()) for x in p], lr=1, momentum=0.9, fused=True
            ),
            "16-bit .* differs from run to run; use foreach=True",
        ),
        (_Own, "_Own is a subclass whose step may differ from AdamW's: use AdamW itself"),
        (_Strange, "_Strange may not step each parameter separately: use one of"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "group 0 has differentiable=True.*=False"),
        (lambda p: torch.optim.Adam(p, capturable=True), "group 0 has capturable=True.*=False"),
    ],
)
def test_what_can_not_be_followed_is_refused_with_a_way_out(make: Any, words: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UnsupportedOptimizer, match=words):
        spec_of(make([parameter]), {parameter: 0})


def test_a_spec_never_names_what_is_run() -> None:
    for name in ("", "os.system", "torch.optim.LBFGS", "SGD"):
        with pytest.raises(UnsupportedOptimizer, match="is not supported"):
            build(pb.OptimizerSpec(name=name), {0: torch.ones(1)})


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("foreach", [False, True])
def test_no_step_reads_another_parameter(name: str, foreach: bool) -> None:
    """Each parameter, alone and cut in two, has the same result as together with others."""
    torch.manual_seed(0)
    start = [torch.randn(64, 7) for _ in range(3)]
    gradients = [[torch.randn(64, 7) for _ in range(3)] for _ in range(4)]
    together = [nn.Parameter(t.clone()) for t in start]
    alone = [nn.Parameter(t.clone()) for t in start]
    halves = [[nn.Parameter(t[:32].clone()), nn.Parameter(t[32:].clone())] for t in start]
    kind: Any = SUPPORTED[name]
    joint = kind(together, foreach=foreach)
    alone_optimizers = [kind([p], foreach=foreach) for p in alone]
    halves_optimizers = [kind(pair, foreach=foreach) for pair in halves]
    for step in gradients:
        for i, gradient in enumerate(step):
            together[i].grad = gradient.clone()
            alone[i].grad = gradient.clone()
            halves[i][0].grad, halves[i][1].grad = gradient[:32].clone(), gradient[32:].clone()
        for optimizer in (joint, *alone_optimizers, *halves_optimizers):
            optimizer.step()
    for whole_tensor, alone_tensor, pair in zip(together, alone, halves, strict=True):
        assert torch.equal(whole_tensor, alone_tensor)
        assert torch.equal(whole_tensor, torch.cat([*pair]))
    assert not torch.equal(together[0], start[0])
    assert copy.deepcopy(joint.state_dict()["param_groups"])[0]["params"] == [0, 1, 2]


def test_the_default_type_is_told() -> None:
    """Torch uses it for numbers of the state, such as step counts."""
    weight = nn.Parameter(torch.zeros(2))
    torch.set_default_dtype(torch.float64)
    try:
        spec = spec_of(torch.optim.SGD([weight], lr=0.1), {weight: 0})
    finally:
        torch.set_default_dtype(torch.float32)
    assert default_dtype(spec) == torch.float64
    assert default_dtype(pb.OptimizerSpec()) == torch.float32
    for no_type in ("int64", "nn", "float33"):
        with pytest.raises(UnsupportedOptimizer, match=f"no floating-point type {no_type}"):
            default_dtype(pb.OptimizerSpec(default_dtype=no_type))


def test_only_groups_with_both_kinds_of_momentum_begin() -> None:
    weights = [
        nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.bfloat16,) * 2 + (torch.float32,) * 2
    ]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=True)
    assert beginnings(optimizer) == []
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    assert beginnings(optimizer) == []
    for weight in weights[::2]:
        optimizer.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    assert beginnings(optimizer) == [pb.Beginning(group=0, dtype="bfloat16")]
    optimizer.param_groups[0]["foreach"] = False
    assert beginnings(optimizer) == []
