"""Parameters and optimizer state as the tensors of a layout, for optimizers whose steps nodes can't repeat.

An optimizer creates its state in its first step. To know it before, a trial with gradients of zeros has it
created, as `torch.distributed.checkpoint` does; then everything is as it was.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from checkmate import state
from checkmate.optim.options import OUTSIDE
from checkmate.optim.several import members_of
from checkmate.optim.supported import UnsupportedOptimizer, copied_spec_of, spec_of
from checkmate.state import StateError, in_memory_order, leaves, local_of
from checkmate.training.errors import RefusedError
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.generators import capture_generators, install_generators
from checkmate.wire.parameter import STATE_ITEMSIZES, LayoutError, Parameter, dim_order

Follow = Literal["auto", "gradients", "state"]
"""How nodes follow: by repeating steps with copied gradients, or by copies of the state itself."""
FOLLOW: Final = get_args(Follow)
TRIAL_STEPS: Final = 2
"""Steps of a trial: some optimizers create a part of their state in the second one."""


class CopiedState:
    """The tensors that are copied after each iteration: parameters, then each tensor of their state.

    Numbers of tensors are those of `described`, as in the layout.
    """

    def __init__(self, model: TrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Try the optimizer out; its state is as before afterwards.

        Raise `UnsupportedOptimizer` if it has no step without a closure, or state that can't be copied.
        """
        self._optimizer = optimizer
        trained = model.trained()
        self.parameters: Final[Sequence[nn.Parameter]] = list(trained.values())
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        self.spec: Final = copied_spec_of(optimizer, numbers)
        chunks = model.describe()
        for member in members_of(optimizer):
            _check_whole(member)
        with tried_out(optimizer) as self._counters:
            tensors = [
                (chunks[number], leaf)
                for number, parameter in enumerate(self.parameters)
                for leaf in _leaves_of(optimizer, parameter)
                if isinstance(leaf.value, torch.Tensor)
            ]
            entries = [_described(chunk, leaf) for chunk, leaf in tensors]
            strides = [leaf.value.stride() for _, leaf in tensors]
        self._strides = dict(enumerate(strides, len(chunks)))
        self.described: Final = [*chunks, *entries]
        names = {name: number for number, name in enumerate(trained)}
        self._numbers = {
            (names[entry.name], entry.state): number
            for number, entry in enumerate(self.described)
            if entry.state
        }
        self._owner = {number: owner for owner, number in self._numbers.items()}
        self._tensors: list[torch.Tensor | None] = []
        self.beside: dict[str, Any] = {}
        """What the tensors lacked when `look` was called."""

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, which are copied in each iteration."""
        return sum(parameter.nbytes for parameter in self.described)

    def look(self) -> None:
        """Find the present tensors, for `flat`. Raise `StateError` if state can't be copied."""
        tensors: list[torch.Tensor | None] = [None] * len(self.described)
        tensors[: len(self.parameters)] = [local_of(parameter) for parameter in self.parameters]
        stateless: list[int] = []
        values: dict[int, dict[str, Any]] = {}
        strides: dict[int, dict[str, tuple[int, ...]]] = {}
        for owner, parameter in enumerate(self.parameters):
            if not self._optimizer.state.get(parameter):
                stateless.append(owner)
                continue
            for leaf in _leaves_of(self._optimizer, parameter):
                number = self._numbers.get((owner, leaf.name))
                if number is not None and self._fits(number, leaf.value):
                    tensors[number] = leaf.value
                    if leaf.value.stride() != self._strides[number]:
                        strides.setdefault(owner, {})[leaf.name] = leaf.value.stride()
                else:
                    values.setdefault(owner, {})[leaf.name] = leaf.value
        absent: dict[int, list[str]] = {}
        for (owner, name), number in self._numbers.items():
            if tensors[number] is None and owner not in stateless and name not in values.get(owner, {}):
                absent.setdefault(owner, []).append(name)
        members = zip(members_of(self._optimizer), self._counters, strict=True)
        counters = [{name: vars(member)[name] for name in names} for member, names in members]
        beside: dict[str, Any] = {"stateless": stateless, "values": values, "absent": absent}
        beside |= {"strides": strides, "counters": counters if any(counters) else []}
        self._tensors, self.beside = tensors, {key: value for key, value in beside.items() if value}

    def flat(self, number: int) -> torch.Tensor | None:
        """Return a tensor that `look` has found, flat and in memory order; `None` if there is none."""
        tensor = self._tensors[number]
        if tensor is None:
            return None
        return in_memory_order(tensor.detach(), self.described[number].dim_order).reshape(-1)

    def value(self, number: int) -> torch.Tensor:
        """Return a tensor as it is now, or zeros if there is none."""
        described = self.described[number]
        if not described.state:
            return local_of(self.parameters[number]).detach()
        owner, name = self._owner[number]
        for leaf in _leaves_of(self._optimizer, self.parameters[owner]):
            if leaf.name == name and self._fits(number, leaf.value):
                tensor: torch.Tensor = leaf.value.detach()
                return tensor
        return torch.zeros(described.shape, dtype=state.DTYPES[described.dtype])

    def values(self, number: int) -> tuple[torch.Tensor, Mapping[str, object]]:
        """Return a tensor as it is now, for seeds. It has no state of its own."""
        return self.value(number), {}

    def install(self, tensors: Mapping[int, torch.Tensor], beside: Mapping[str, Any]) -> None:
        """Set parameters and optimizer state to what was copied.

        The state is created by a trial, so that all of it has the optimizer's own types and devices.

        Args:
            tensors: All tensors, in the script's shapes.
            beside: What `look` has found beside them.

        Raises:
            StateError: The optimizer does not create such state.
        """
        stateless, values, absent, strides = (
            beside.get(key, {}) for key in ("stateless", "values", "absent", "strides")
        )
        for member, counters in zip(members_of(self._optimizer), beside.get("counters", ()), strict=False):
            vars(member).update(counters)
        with tried_out(self._optimizer, stays=True):
            pass
        self.install_parameters(tensors)
        with torch.no_grad():
            for owner, parameter in enumerate(self.parameters):
                if owner in stateless:
                    for member in members_of(self._optimizer):
                        member.state.pop(parameter, None)
                    continue
                of_owner = (values.get(owner, {}), absent.get(owner, ()), strides.get(owner, {}))
                self._install(owner, parameter, tensors, *of_owner)

    def install_states(
        self, states: Sequence[Mapping[Any, Any]], counters: Sequence[Mapping[str, Any]]
    ) -> None:
        """Set the optimizer's state to that of a checkpoint; parameters are as they are.

        A tensor that consists of others may be a dictionary of them. Raise `StateError` as `install`.

        Args:
            states: The state of each parameter, as in `state_dict()`.
            counters: Numbers of the optimizers themselves.
        """
        names = {(owner, _plain_name(name)): name for owner, name in self._numbers}
        tensors: dict[int, torch.Tensor] = {n: self.value(n).clone() for n in range(len(self.parameters))}
        values: dict[int, dict[str, Any]] = {}
        absent: dict[int, list[str]] = {}
        for owner, entries in enumerate(states):
            plain = {_plain_name(leaf.name): leaf.value for leaf in leaves(entries)}
            saved = {names.get((owner, name), name): value for name, value in plain.items()}
            for name, value in saved.items():
                number = self._numbers.get((owner, name))
                if number is not None and self._fits(number, value):
                    tensors[number] = value
                else:
                    values.setdefault(owner, {})[name] = value
            absent[owner] = [name for at, name in self._numbers if at == owner and name not in saved]
        stateless = [owner for owner, entries in enumerate(states) if not entries]
        beside = {"stateless": stateless, "values": values, "absent": absent, "counters": counters}
        self.install(tensors, beside)

    def install_parameters(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Set the parameters alone."""
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                local_of(parameter).copy_(tensors[number])

    def _install(
        self,
        owner: int,
        parameter: nn.Parameter,
        tensors: Mapping[int, torch.Tensor],
        values: Mapping[str, Any],
        absent: Sequence[str],
        strides: Mapping[str, Sequence[int]],
    ) -> None:
        remaining = dict(values)
        for leaf in list(_leaves_of(self._optimizer, parameter)):
            number = self._numbers.get((owner, leaf.name))
            if leaf.name in remaining:
                leaf.replace(_like(remaining.pop(leaf.name), parameter))
            elif leaf.name in absent or number is None:
                leaf.remove()
            elif leaf.holder is not None and leaf.holder[leaf.key] is leaf.value:
                stride = strides.get(leaf.name, self._strides[number])
                leaf.replace(_strided(leaf.value, stride).copy_(tensors[number]))
            else:
                leaf.value.copy_(tensors[number])
        for name, value in remaining.items():
            if name != next(iter(state.nested({name: value}))):
                raise StateError(
                    f"{name} of the optimizer state of {self.described[owner].name} has no place: "
                    "what it is in is not made by the script's optimizer"
                )
            self._optimizer.state[parameter][name] = _like(value, parameter)

    def _fits(self, number: int, value: object) -> bool:
        described = self.described[number]
        return isinstance(value, torch.Tensor) and (
            (tuple(value.shape), state.dtype_name(value.dtype)) == (described.shape, described.dtype)
        )


def copied_state_of(
    model: TrainedModel, optimizer: torch.optim.Optimizer, follow: Follow, copies: str
) -> CopiedState | None:
    """Return what is copied in place of gradients; `None` if nodes repeat the optimizer's steps.

    Args:
        model: The model.
        optimizer: The optimizer, or several.
        follow: With `auto`, state is copied if nodes can't repeat the optimizer's steps.
        copies: The job's way of copies.

    Raises:
        RefusedError: `follow` is unknown, or state can't be copied in this way.
        UnsupportedOptimizer: Neither is possible.
    """
    if follow not in FOLLOW:
        raise RefusedError(f"follow={follow!r}: must be one of {', '.join(map(repr, FOLLOW))}")
    by_hosts = copies == "host"
    if follow == "state" and not by_hosts:
        raise RefusedError(
            "follow='state' needs copies by hosts, because no reduction carries the state over the network: "
            "write copies: host into the job file"
        )
    if follow == "state":
        return CopiedState(model, optimizer)
    numbers = {parameter: number for number, parameter in enumerate(model.trained().values())}
    try:
        spec_of(optimizer, numbers)
    except UnsupportedOptimizer as error:
        if by_hosts and follow == "auto":
            return CopiedState(model, optimizer)
        hint = "follow='auto'" if by_hosts else "a job with copies: host"
        raise UnsupportedOptimizer(f"{error}; or have its state copied, which {hint} does") from None
    return None


def _leaves_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Iterator[state.Leaf]:
    entries = optimizer.state.get(parameter)
    return leaves(entries) if entries else iter(())


def _strided(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor, or one like it with these strides, on which the bits of matrices' products depend."""
    if tensor.stride() == tuple(stride):
        return tensor
    return torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device)


def _plain_name(name: str) -> str:
    """Return a leaf's name as it is where a dictionary has the parts of a tensor."""
    return name.replace(":", ".")


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """Return a value for the state of a parameter: a tensor of several elements is on its device."""
    if isinstance(value, torch.Tensor) and value.dim():
        return value.to(parameter.device)
    return value


def _described(chunk: Parameter, leaf: state.Leaf) -> Parameter:
    """Return an entry of a parameter's state as a layout has it. `chunk`: the parameter itself."""
    value: torch.Tensor = leaf.value
    dtype = state.dtype_name(value.dtype)
    if value.layout is not torch.strided or dtype not in STATE_ITEMSIZES:
        raise UnsupportedOptimizer(
            f"the state of {chunk.name}, {leaf.name}, is a tensor of {dtype}, {value.layout}, which can't be "
            f"copied; it may be dense, of {', '.join(STATE_ITEMSIZES)}"
        )
    try:
        order = dim_order(value.shape, value.stride())
    except LayoutError:  # it is copied element by element
        order = ()
    is_chunk = bool(chunk.whole) and tuple(value.shape) == chunk.shape
    whole, offset = (chunk.whole, chunk.offset) if is_chunk else ((), ())
    return Parameter(chunk.name, tuple(value.shape), dtype, order, whole, offset, state=leaf.name)


def _check_whole(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedOptimizer` if an optimizer keeps some state elsewhere than in `state`."""
    name = type(optimizer).__name__
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state:
            raise UnsupportedOptimizer(
                f"{name} wraps another optimizer, in {attribute}, whose own state would not be copied: use "
                "an optimizer that keeps all of it in its `state`"
            )


@contextmanager
def tried_out(optimizer: torch.optim.Optimizer, *, stays: bool = False) -> Iterator[list[list[str]]]:
    """Step with gradients of zeros; then the optimizer has the state that such steps create.

    Yields, for each optimizer, the names of its own numbers that steps change.

    At the end of the context it has the state that it had before, unless it `stays`. Parameters, gradients,
    options, generators and the optimizer's own numbers are as before in any case, and its hooks are not
    called. Raise `UnsupportedOptimizer` if it can't step so.
    """
    generators = _as_stored(capture_generators())
    before = [(member, member.state) for member in members_of(optimizer)]
    try:
        counters = []
        for member, _ in before:
            member.state = defaultdict(dict)
            counters.append(_try_out(member))
        install_generators(generators)
        yield counters
    finally:
        if not stays:
            for member, its_state in before:
                member.state = its_state


def _as_stored(generators: dict[str, Any]) -> dict[str, Any]:
    """Return states of generators in the form in which records have them."""
    return state.load_generators(state.dump_generators(generators))


def _try_out(member: torch.optim.Optimizer) -> list[str]:
    """Step, and put back all but the state. Return the names of the optimizer's own numbers that change."""
    parameters = [p for group in member.param_groups for p in group["params"] if p.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    values = [local_of(parameter).detach().to("cpu", copy=True) for parameter in parameters]
    options = [
        {key: copy.deepcopy(value) for key, value in group.items() if key not in OUTSIDE}
        for group in member.param_groups
    ]
    numbers = {key: value for key, value in vars(member).items() if type(value) in _PLAIN}
    tensors = _own_tensors(member)
    hooks: dict[str, Any] = {name: vars(member)[name] for name in _HOOKS if name in vars(member)}
    try:
        vars(member).update({name: OrderedDict() for name in hooks})
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(TRIAL_STEPS):
            member.step()
        changed = [name for name, value in numbers.items() if vars(member).get(name) != value]
        changed += [name for name, value in vars(member).items() if _is_new_number(name, value, numbers)]
        if elsewhere := sorted(_own_tensors(member) - tensors):
            raise TypeError(
                f"it keeps {elsewhere[0][0]} outside of its `state`, where it would not be copied"
            )
    except Exception as error:
        raise UnsupportedOptimizer(
            f"{type(member).__name__}: its state can't be copied, because a trial of its step, with zeros as "
            f"gradients, fails: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    finally:
        vars(member).update(hooks)
        vars(member).update(numbers)
        with torch.no_grad():
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                local_of(parameter).copy_(value)
                parameter.grad = gradient
        for group, saved in zip(member.param_groups, options, strict=True):
            _put_back(group, saved)
    return [name for name in changed if name not in _TORCHS]


def _is_new_number(name: str, value: object, before: Mapping[str, object]) -> bool:
    return type(value) in _PLAIN and name not in before


def _own_tensors(member: torch.optim.Optimizer) -> set[tuple[str, int, int]]:
    """Return the tensors that are attributes of an optimizer, or in such a list or dictionary."""
    tensors = set()
    for name, value in vars(member).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        tensors |= {(name, id(item), item._version) for item in values if isinstance(item, torch.Tensor)}
    return tensors


_TORCHS: Final = frozenset({"_opt_called", "_step_count"})
"""Numbers by which torch's schedulers check the order of calls."""
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_PLAIN: Final = frozenset((bool, int, float, str, type(None)))


def _put_back(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a parameter group its earlier options; tensors keep their identity."""
    for key in group.keys() - saved.keys() - {*OUTSIDE}:
        del group[key]
    for key, value in saved.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                present.copy_(value)
        else:
            group[key] = value
