"""Which optimizers Checkmate can follow, and how one is described and built again.

A shadow node steps a shard, whole parameters, with the class and implementation (`foreach`, `fused`, neither)
that training uses. That gives training's bits only if a parameter's step reads no other parameter, and if it
works element by element, so that no sum depends on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from checkmate.optim.options import OptionsError, apply_options, options_of, parse_options
from checkmate.rpc import shadow_pb2 as pb

__all__ = [
    "FROZEN",
    "SUPPORTED",
    "UnsupportedOptimizer",
    "apply_options",
    "beginnings",
    "build",
    "check_options",
    "default_dtype",
    "options_of",
    "spec_of",
    "steps_alike",
]

FROZEN: Final = 0xFFFF_FFFF
"""In a spec: a parameter that the optimizer has and training doesn't reduce, for it needs no gradient."""

SUPPORTED: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    f"torch.optim.{kind.__name__}": kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    )
}
"""Their steps were read: element by element, and from a parameter's own gradient and state alone."""

_INSTEAD: Final = "use one of " + ", ".join(kind.__name__ for kind in SUPPORTED.values())
_REASONS: Final = {
    "LBFGS": "its step couples all parameters and evaluates the model again",
    "SparseAdam": "it takes sparse gradients, and what training reduces is dense",
    "Adafactor": "its step sums over whole parameters, and the bits of sums depend on the number of threads",
    "Muon": "its step multiplies matrices, and the bits of products depend on the number of threads",
    "ZeroRedundancyOptimizer": "it keeps each rank's part of the state elsewhere",
}
_EXOTIC: Final = {
    "capturable": "it is meant for CUDA graphs; build the optimizer with capturable=False",
    "differentiable": "a step through which gradients flow can't be repeated elsewhere; "
    "build the optimizer with differentiable=False",
}


class UnsupportedOptimizer(ValueError):
    """An optimizer whose steps a shadow node can't repeat; the message says why and what to do instead."""


def spec_of(optimizer: torch.optim.Optimizer, number: Mapping[nn.Parameter, int]) -> pb.OptimizerSpec:
    """Describe an optimizer: class, groups, and each group's parameters by their number in the layout.

    `number` has the parameters that training reduces. A parameter that it lacks and that needs no gradient is
    `FROZEN`. `UnsupportedOptimizer` for a class, an option or a parameter that can't be followed.
    """
    kind = type(optimizer)
    name = f"torch.optim.{kind.__name__}"
    if SUPPORTED.get(name) is not kind:
        raise UnsupportedOptimizer(_why_not(optimizer))
    default = str(torch.get_default_dtype()).removeprefix("torch.")
    spec = pb.OptimizerSpec(name=name, threads=torch.get_num_threads(), default_dtype=default)
    for index, group in enumerate(optimizer.param_groups):
        check_options(group, index)
        if kind is torch.optim.SGD:
            _check_fused_momentum(group, index)
        numbers = [_number(parameter, number, index) for parameter in group["params"]]
        try:
            spec.groups.add(parameters=numbers, options=options_of(group), names=group.get("param_names", ()))
        except OptionsError as error:
            raise UnsupportedOptimizer(f"parameter group {index}: {error}") from None
    return spec


def default_dtype(spec: pb.OptimizerSpec) -> torch.dtype:
    """Torch's default type where the optimizer was described. `UnsupportedOptimizer` if there is no such."""
    found = getattr(torch, spec.default_dtype or "float32", None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UnsupportedOptimizer(f"torch has no floating-point type {spec.default_dtype}")
    return found


def steps_alike(one: pb.OptimizerSpec, other: pb.OptimizerSpec) -> bool:
    """Whether what is built for one spec steps like the other: hyperparameters come with each step."""
    try:
        return _kind_of_step(one) == _kind_of_step(other)
    except OptionsError:
        return False


def _kind_of_step(spec: pb.OptimizerSpec) -> tuple[object, ...]:
    """All that `build` and a node's cut depend on."""
    options = [parse_options(group.options) for group in spec.groups]
    implementations = [(one.get("foreach"), one.get("fused")) for one in options]
    groups = [list(group.parameters) for group in spec.groups]
    return spec.name, spec.threads, spec.default_dtype or "float32", implementations, groups


def beginnings(optimizer: torch.optim.Optimizer) -> list[pb.Beginning]:
    """Groups and 16-bit types of which only some parameters have momentum before SGD's next `foreach` step.

    It then multiplies the momentum of all of these by other kernels than else, and to other bits.
    """
    found: list[pb.Beginning] = []
    if type(optimizer) is not torch.optim.SGD:
        return found
    for index, group in enumerate(optimizer.param_groups):
        if group["foreach"] and group["momentum"]:
            short = [p for p in group["params"] if p.grad is not None and p.element_size() == 2]
            has = {p: optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in short}
            mixed = {p.dtype for p in short if has[p]} & {p.dtype for p in short if not has[p]}
            found += [pb.Beginning(group=index, dtype=str(one).removeprefix("torch.")) for one in mixed]
    return found


def check_options(group: Mapping[str, object], index: int) -> None:
    """Refuse a parameter group that asks for a step that can't be repeated."""
    for option, reason in _EXOTIC.items():
        if group.get(option):
            raise UnsupportedOptimizer(f"parameter group {index} has {option}=True: {reason}")


def build(spec: pb.OptimizerSpec, parameters: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer of the spec's class, groups, options and implementation, of those parameters only.

    `parameters` has tensors by their number in the layout; groups without any are left out. `ValueError`
    where the spec has none of them, `UnsupportedOptimizer` where it names a class that isn't followed.
    """
    kind = SUPPORTED.get(spec.name)
    if kind is None:
        raise UnsupportedOptimizer(f"{spec.name or 'no optimizer'} can't be followed: {_INSTEAD}")
    groups = []
    for group in spec.groups:
        chosen = [parameters[i] for i in group.parameters if i in parameters]
        if chosen:
            groups.append({**parse_options(group.options), "params": chosen})
    if not groups:
        raise ValueError("the optimizer has none of these parameters")
    return kind(groups)  # type: ignore[call-arg]


def _check_fused_momentum(group: Mapping[str, Any], index: int) -> None:
    """Torch's fused SGD gives such momentum other bits in each run (seen with 2.13)."""
    if group["fused"] and group["momentum"] and any(p.element_size() == 2 for p in group["params"]):
        raise UnsupportedOptimizer(
            f"parameter group {index} has 16-bit parameters, and torch's fused SGD gives their momentum "
            "other bits in each run; use foreach=True"
        )


def _number(parameter: nn.Parameter, number: Mapping[nn.Parameter, int], group: int) -> int:
    found = number.get(parameter)
    if found is not None:
        return found
    if parameter.requires_grad:
        raise UnsupportedOptimizer(
            f"parameter group {group} has a parameter of shape {tuple(parameter.shape)} that the model "
            "does not have or that training does not reduce; give it an optimizer of its own"
        )
    return FROZEN


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    reason = _REASONS.get(kind.__name__)
    if reason is not None:
        return f"{kind.__name__} can't be followed: {reason}; {_INSTEAD}"
    ours = next((base.__name__ for base in kind.__mro__ if base in SUPPORTED.values()), None)
    if ours is not None:
        return (
            f"{kind.__name__} is a class of its own, and its step may differ from {ours}'s: use {ours} itself"
        )
    return f"{kind.__module__}.{kind.__name__} is not known to step each parameter by itself: {_INSTEAD}"
