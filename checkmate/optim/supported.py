"""The optimizers that Checkmate supports, and their descriptions, from which they are rebuilt.

A shadow node steps the whole parameters of a shard, with the class and implementation (`foreach`, `fused`,
neither) that training uses. The results are bit-identical only if a parameter's step does not read other
parameters, and works element by element, so that no sum depends on the number of threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

import torch
from torch import nn

from checkmate.errors import CheckmateError
from checkmate.optim.kernel import powers_of
from checkmate.optim.options import OptionsError, apply_options, options_of, parse_options
from checkmate.optim.several import members_of
from checkmate.rpc import shadow_pb2 as pb

__all__ = [
    "FROZEN",
    "SUPPORTED",
    "UnsupportedOptimizer",
    "apply_options",
    "beginnings",
    "build",
    "check_options",
    "copied_spec_of",
    "default_dtype",
    "kind_of",
    "optimizer_classes",
    "options_of",
    "spec_of",
    "steps_alike",
    "why_unknown",
]

_log: Final = logging.getLogger("checkmate")

FROZEN: Final = 0xFFFF_FFFF
"""In a spec: a parameter of the optimizer that training does not reduce, because it needs no gradient."""

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
"""Optimizers whose steps work element by element, on a parameter's own gradient and state only."""

ENTRY_POINTS: Final = "checkmate.optimizers"
"""The group of entry points by which an installed package adds optimizers of its own."""


@cache
def _installed_optimizers() -> Mapping[str, type[torch.optim.Optimizer]]:
    """Return the optimizers of installed packages, by their entry points' values (`package.module:Class`).

    A shadow node rebuilds one from its own installed package: a spec names it, and brings no code.
    """
    classes = {}
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            classes[entry.value] = entry.load()
        except Exception as error:  # noqa: BLE001 - another package's, which must not hide the others
            _log.warning("the optimizer %s of an entry point can't be loaded: %r", entry.value, error)
    return classes


def optimizer_classes() -> list[type[torch.optim.Optimizer]]:
    """Return the optimizers that shadow nodes here can follow: PyTorch's, and those of installed packages."""
    return [*SUPPORTED.values(), *_installed_optimizers().values()]


def why_unknown(name: str) -> str:
    """Return why no optimizer has this name in a spec, or ""."""
    if name in SUPPORTED or (":" in name and name in _installed_optimizers()):
        return ""
    if ":" in name:
        return (
            f"no package here has the optimizer {name} as an entry point of {ENTRY_POINTS}: install the "
            "trainers' one on shadow nodes, too"
        )
    return f"{name or '(unnamed)'} is not supported: {_INSTEAD}"


_INSTEAD: Final = "use one of " + ", ".join(kind.__name__ for kind in SUPPORTED.values())
_REASONS: Final = {
    "LBFGS": "its step couples all parameters and reevaluates the model",
    "SparseAdam": "it takes sparse gradients, but training reduces dense ones",
    "Adafactor": "its step sums over whole parameters, and the bits of sums depend on the number of threads",
    "Muon": "its step multiplies matrices, and the bits of products depend on the number of threads",
    "ZeroRedundancyOptimizer": "it keeps a different part of the state on each rank",
}
_EXOTIC: Final = {
    "capturable": "it is for CUDA graphs; build the optimizer with capturable=False",
    "differentiable": "a differentiable step cannot be repeated on shadow nodes; "
    "build the optimizer with differentiable=False",
}


class UnsupportedOptimizer(CheckmateError, ValueError):
    """A shadow node cannot repeat an optimizer's steps; the message has the reason and an alternative."""


def spec_of(optimizer: torch.optim.Optimizer, number: Mapping[nn.Parameter, int]) -> pb.OptimizerSpec:
    """Describe an optimizer: class, groups, and the numbers of each group's parameters.

    Args:
        optimizer: the optimizer, or several.
        number: numbers in the layout of the parameters that training reduces. Other parameters that need no
            gradient are `FROZEN`.

    Returns:
        The description for shadow nodes.

    Raises:
        UnsupportedOptimizer: if its class, an option or a parameter is not supported.
    """
    default = str(torch.get_default_dtype()).removeprefix("torch.")
    spec = pb.OptimizerSpec(threads=torch.get_num_threads(), default_dtype=default)
    for member in members_of(optimizer):
        _add_groups(spec, member, number)
        _add_powers(spec, member)
    if any(group.optimizer != spec.groups[0].optimizer for group in spec.groups):
        return spec
    spec.name = spec.groups[0].optimizer
    for group in spec.groups:
        group.optimizer = ""
    return spec


def copied_spec_of(optimizer: torch.optim.Optimizer, number: Mapping[nn.Parameter, int]) -> pb.OptimizerSpec:
    """Describe an optimizer whose state is copied, so that its step may be any; otherwise like `spec_of`."""
    spec = pb.OptimizerSpec(copied=True)
    for member in members_of(optimizer):
        kind = type(member)
        if kind.__name__ == "LBFGS":
            raise UnsupportedOptimizer(
                f"LBFGS can't be followed, nor its state be copied: {_REASONS['LBFGS']}, so that no "
                "iteration has an end that all ranks know; use an optimizer whose step follows one backward"
            )
        _add_groups_named(spec, member, f"{kind.__module__}.{kind.__qualname__}", number)
    return spec


def _add_groups(
    spec: pb.OptimizerSpec, optimizer: torch.optim.Optimizer, number: Mapping[nn.Parameter, int]
) -> None:
    """Add the groups of one optimizer to a spec. Raise as `spec_of`."""
    kind = type(optimizer)
    name = f"torch.optim.{kind.__name__}"
    if SUPPORTED.get(name) is not kind:
        name = next((name for name, cls in _installed_optimizers().items() if cls is kind), "")
        if not name:
            raise UnsupportedOptimizer(_why_not(optimizer))
    for index, group in enumerate(optimizer.param_groups, len(spec.groups)):
        check_options(group, index)
        if kind is torch.optim.SGD:
            _check_fused_momentum(group, index)
    _add_groups_named(spec, optimizer, name, number)


def _add_groups_named(
    spec: pb.OptimizerSpec, optimizer: torch.optim.Optimizer, name: str, number: Mapping[nn.Parameter, int]
) -> None:
    """Add the groups of one optimizer, with its `name` in a spec. Raise as `spec_of`."""
    for group in optimizer.param_groups:
        index = len(spec.groups)
        numbers = [_number(parameter, number, index) for parameter in group["params"]]
        try:
            options = options_of(group)
        except OptionsError as error:
            raise UnsupportedOptimizer(f"parameter group {index}: {error}") from None
        spec.groups.add(
            parameters=numbers, options=options, names=group.get("param_names", ()), optimizer=name
        )


def _add_powers(spec: pb.OptimizerSpec, optimizer: torch.optim.Optimizer) -> None:
    """Add the powers of the betas of a fused Adam on a GPU."""
    present = {powers.base for powers in spec.powers}
    for group in optimizer.param_groups:
        device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
        if not group.get("fused") or device.type != "cuda":
            continue
        for beta in {beta for beta in group.get("betas", ()) if type(beta) is float} - present:
            if (values := powers_of(beta, device)) is not None:
                present.add(beta)
                spec.powers.add(base=beta, values=values.cpu().numpy().astype("<f4").tobytes())


def kind_of(spec: pb.OptimizerSpec, group: pb.ParamGroup) -> str:
    """Return the name of the optimizer that steps a group, such as `torch.optim.AdamW`."""
    return group.optimizer or spec.name


def default_dtype(spec: pb.OptimizerSpec) -> torch.dtype:
    """Return the trainers' default type of torch. Raise `UnsupportedOptimizer` if it is unknown."""
    dtype = getattr(torch, spec.default_dtype or "float32", None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UnsupportedOptimizer(f"torch has no floating-point type {spec.default_dtype}")
    return dtype


def steps_alike(first: pb.OptimizerSpec, second: pb.OptimizerSpec) -> bool:
    """Return whether two specs step alike, apart from hyperparameters, which are part of each step."""
    try:
        return _kind_of_step(first) == _kind_of_step(second)
    except OptionsError:
        return False


def _kind_of_step(spec: pb.OptimizerSpec) -> tuple[object, ...]:
    """Return everything on which `build` and a replica's blocks depend."""
    options = [parse_options(group.options) for group in spec.groups]
    implementations = [(values.get("foreach"), values.get("fused")) for values in options]
    groups = [list(group.parameters) for group in spec.groups]
    kinds = [kind_of(spec, group) for group in spec.groups]
    powers = {(of_base.base, of_base.values) for of_base in spec.powers}
    if spec.copied:
        return kinds, groups, True
    return kinds, spec.threads, spec.default_dtype or "float32", implementations, groups, powers


def beginnings(optimizer: torch.optim.Optimizer, first_group: int = 0) -> list[pb.Beginning]:
    """Return groups and 16-bit types in which only some parameters have momentum before SGD's `foreach` step.

    That step then uses other kernels than usual for the momentum of all of them, with different bits.
    `first_group`: the number of its first group in the spec.
    """
    mixed_groups: list[pb.Beginning] = []
    if type(optimizer) is not torch.optim.SGD:
        return mixed_groups
    for index, group in enumerate(optimizer.param_groups, first_group):
        if group["foreach"] and group["momentum"]:
            short = [p for p in group["params"] if p.grad is not None and p.element_size() == 2]
            has = {p: optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in short}
            mixed = {p.dtype for p in short if has[p]} & {p.dtype for p in short if not has[p]}
            mixed_groups += [
                pb.Beginning(group=index, dtype=str(dtype).removeprefix("torch.")) for dtype in mixed
            ]
    return mixed_groups


def check_options(group: Mapping[str, object], index: int) -> None:
    """Raise `UnsupportedOptimizer` if a parameter group has an option whose step cannot be repeated."""
    for option, reason in _EXOTIC.items():
        if group.get(option):
            raise UnsupportedOptimizer(f"parameter group {index} has {option}=True: {reason}")


def build(spec: pb.OptimizerSpec, parameters: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer of the spec's class, groups, options and implementation for some parameters.

    All of them must be of groups that one class steps.

    Args:
        spec: the description.
        parameters: tensors by their number in the layout. Groups without any are left out.

    Returns:
        The optimizer.

    Raises:
        ValueError: if the spec has none of the parameters, or several classes step them.
        UnsupportedOptimizer: if its class is not supported.
    """
    names = {kind_of(spec, group) for group in spec.groups} or {spec.name}
    if reasons := sorted(filter(None, map(why_unknown, names))):
        raise UnsupportedOptimizer(reasons[0])
    groups, kinds = [], set[str]()
    for group in spec.groups:
        members = [parameters[i] for i in group.parameters if i in parameters]
        if members:
            groups.append({**parse_options(group.options), "params": members})
            kinds.add(kind_of(spec, group))
    if not groups:
        raise ValueError("the optimizer has none of these parameters")
    name, *further = kinds
    if further:
        raise ValueError(f"{name} and {further[0]} step them, which takes two optimizers")
    kind: Any = SUPPORTED.get(name) or _installed_optimizers()[name]
    optimizer: torch.optim.Optimizer = kind(groups)
    return optimizer


def _check_fused_momentum(group: Mapping[str, Any], index: int) -> None:
    """Refuse fused SGD with 16-bit momentum, whose bits differ from run to run (with torch 2.13)."""
    if group["fused"] and group["momentum"] and any(p.element_size() == 2 for p in group["params"]):
        raise UnsupportedOptimizer(
            f"parameter group {index} has 16-bit parameters, and with torch's fused SGD their momentum "
            "differs from run to run; use foreach=True"
        )


def _number(parameter: nn.Parameter, number: Mapping[nn.Parameter, int], group: int) -> int:
    value = number.get(parameter)
    if value is not None:
        return value
    if parameter.requires_grad:
        raise UnsupportedOptimizer(
            f"parameter group {group} has a parameter of shape {tuple(parameter.shape)} that the model "
            "does not have or that training does not reduce; use another optimizer for it. If fully_shard "
            "has replaced it, make the optimizer after that. If it is an fp32 copy of a parameter, keep the "
            "parameter itself in fp32, and compute in bf16 by autocast or by FSDP's param_dtype"
        )
    return FROZEN


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    reason = _REASONS.get(kind.__name__)
    if reason is not None:
        return f"{kind.__name__} is not supported: {reason}; {_INSTEAD}"
    base_name = next((base.__name__ for base in kind.__mro__ if base in SUPPORTED.values()), None)
    if base_name is not None:
        return (
            f"{kind.__name__} is a subclass whose step may differ from {base_name}'s: use {base_name} itself"
        )
    return (
        f"{kind.__module__}.{kind.__name__} may not step each parameter separately: {_INSTEAD}; if it does, "
        "add it (`checkmate docs training`, An optimizer of your own)"
    )
