"""A trial of an optimizer's step, which creates the state that has to be known before the first one.

`torch.distributed.checkpoint` does so, too. Everything but the state is put back.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import xxhash

from checkmate import state
from checkmate.optim.options import OUTSIDE
from checkmate.optim.several import members_of
from checkmate.optim.supported import UnsupportedOptimizer
from checkmate.state import bytes_of, local_of
from checkmate.training.record.generators import capture_generators, install_generators

STEPS: Final = 2
"""Steps of a trial: some optimizers create a part of their state in the second one."""
_DEPTH: Final = 4
"""Lists and dictionaries within each other in which an optimizer's attributes are looked at."""
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_ELSEWHERE: Final = frozenset({*_HOOKS, "state", "param_groups", "defaults"})
"""Attributes that are put back in another way, or are no state."""
_TORCHS: Final = frozenset({"_opt_called", "_step_count"})
"""Numbers by which torch's schedulers check the order of calls."""
_PLAIN: Final = frozenset((bool, int, float, str, type(None)))


@contextmanager
def tried_out(optimizer: torch.optim.Optimizer, *, stays: bool = False) -> Iterator[list[list[str]]]:
    """Step with gradients of zeros; then the optimizer has the state that such steps create.

    Yields, for each optimizer, the names of its own numbers that steps change.

    At the end of the context it has the state that it had before, unless it `stays`. Parameters, gradients,
    options, generators and the optimizer's own numbers are as before in any case, and its own hooks are not
    called. Raise `UnsupportedOptimizer` if it can't step so, or keeps state elsewhere.
    """
    generators = state.load_generators(state.dump_generators(capture_generators()))
    before = [(member, member.state) for member in members_of(optimizer)]
    swapped: list[tuple[torch.optim.Optimizer, Any]] = []
    try:
        counters = []
        for member, its_state in before:
            _swap_state(member)
            swapped.append((member, its_state))
            _check_whole(member)
            counters.append(_try_out(member))
        install_generators(generators)
        yield counters
    finally:
        if not stays:
            for member, its_state in swapped:
                member.state = its_state


def _swap_state(member: torch.optim.Optimizer) -> None:
    """Give an optimizer empty state. Raise `UnsupportedOptimizer` if it only shows another one's."""
    try:
        member.state = defaultdict(dict)
    except AttributeError:
        raise UnsupportedOptimizer(
            f"{type(member).__name__} wraps another optimizer, whose state it shows as its own: pass an "
            "optimizer that has its state itself"
        ) from None


def _check_whole(member: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedOptimizer` if an optimizer has another one that does not use its new state."""
    name = type(member).__name__
    for attribute, value in vars(member).items():
        for inner in _within(value, torch.optim.Optimizer):
            if inner.state is not member.state:
                raise UnsupportedOptimizer(
                    f"{name} wraps another optimizer, in {attribute}, whose own state would not be copied: "
                    "use an optimizer that keeps all of it in its `state`, or pass several to checkmate"
                )


def _within(value: Any, kind: type, depth: int = 0) -> Iterator[Any]:
    """Yield the things of a kind in a value, or in lists and dictionaries of it."""
    if isinstance(value, kind):
        yield value
    elif depth < _DEPTH and isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _within(item, kind, depth + 1)


def _try_out(member: torch.optim.Optimizer) -> list[str]:
    """Step, and put back all but the state. Return the names of the optimizer's own numbers that change."""
    parameters = [p for group in member.param_groups for p in group["params"] if p.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    values = [local_of(parameter).detach().to("cpu", copy=True) for parameter in parameters]
    options = [
        {key: copy.deepcopy(value) for key, value in group.items() if key not in OUTSIDE}
        for group in member.param_groups
    ]
    names = set(vars(member))
    numbers = {key: value for key, value in vars(member).items() if type(value) in _PLAIN}
    hooks: dict[str, Any] = {name: vars(member)[name] for name in _HOOKS if name in vars(member)}
    ids = {id(parameter) for group in member.param_groups for parameter in group["params"]}
    prints = _fingerprints(member, ids)
    try:
        vars(member).update({name: OrderedDict() for name in hooks})
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(STEPS):
            member.step()
        changed = [n for n, v in vars(member).items() if type(v) in _PLAIN and numbers.get(n, _PLAIN) != v]
        now = _fingerprints(member, ids)
        if elsewhere := sorted(name for name, value in now.items() if prints.get(name, value) != value):
            raise TypeError(f"it keeps {elsewhere[0]} outside of its `state`, where it would not be copied")
    except Exception as error:
        raise UnsupportedOptimizer(
            f"{type(member).__name__}: its state can't be copied, because a trial of its step, with zeros as "
            f"gradients, fails: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    finally:
        for name in vars(member).keys() - names:
            if type(vars(member)[name]) in _PLAIN:
                del vars(member)[name]
        vars(member).update(hooks)
        vars(member).update(numbers)
        with torch.no_grad():
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                local_of(parameter).copy_(value)
                parameter.grad = gradient
        for group, saved in zip(member.param_groups, options, strict=True):
            _put_back(group, saved)
    return [name for name in changed if name not in _TORCHS]


def _fingerprints(member: torch.optim.Optimizer, parameters: Collection[int]) -> dict[str, object]:
    """Return what tells changes of an optimizer's attributes, without numbers, which are put back.

    A tensor that was made again, or moved to a device, counts as the same if its bytes are. `parameters`: ids
    of tensors that may change.
    """
    return {
        name: _fingerprint(value, parameters, 0)
        for name, value in vars(member).items()
        if name not in _ELSEWHERE and type(value) not in _PLAIN
    }


def _fingerprint(value: Any, parameters: Collection[int], depth: int) -> object:
    if isinstance(value, torch.Tensor):
        if id(value) in parameters:
            return "parameter"
        data = local_of(value).detach().cpu().contiguous()
        return state.dtype_name(value.dtype), tuple(value.shape), xxhash.xxh3_128_digest(bytes_of(data))
    if isinstance(value, torch.Generator):
        return bytes(bytes_of(value.get_state()))
    if type(value) in _PLAIN:
        return value
    if depth < _DEPTH and isinstance(value, Mapping):
        return tuple((str(key), _fingerprint(item, parameters, depth + 1)) for key, item in value.items())
    if depth < _DEPTH and isinstance(value, list | tuple):
        return tuple(_fingerprint(item, parameters, depth + 1) for item in value)
    return type(value).__qualname__


def _put_back(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a parameter group its earlier options; tensors keep their identity."""
    for key in group.keys() - saved.keys() - {*OUTSIDE}:
        del group[key]
    for key, value in saved.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                present.copy_(value)
        elif type(value) in _PLAIN or present != value:  # what did not change keeps its identity
            group[key] = value
