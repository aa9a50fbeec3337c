"""An optimizer as a user names it, `adamw` or `sgd,momentum=0.9`: its spec, and what state it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from inspect import signature
from typing import Final

import torch
from torch import nn

from checkmate.optim.supported import SUPPORTED, UnsupportedOptimizer, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import DTYPES

_BY_NAME: Final = {kind.__name__.lower(): kind for kind in SUPPORTED.values()}
_WORDS: Final[Mapping[str, object]] = {"true": True, "false": False, "none": None}
_PROBED: Final = 64
"""Elements of a parameter that is stepped to see what state there is."""


class OptimizerError(ValueError):
    """No such optimizer, or options that it does not take."""

    exit_code = 2


class NamedOptimizer:
    """One of the optimizers that shadow nodes can follow, with its options."""

    def __init__(self, said: str) -> None:
        """`NAME[,OPTION=VALUE...]`, the name in any case. `OptimizerError` for what can't be followed."""
        name, *options = said.split(",")
        kind = _BY_NAME.get(name.strip().lower())
        if kind is None:
            known = ", ".join(_BY_NAME)
            raise OptimizerError(f"no optimizer {name}; shadow nodes can follow {known}")
        self._kind = kind
        self._options = dict(_option(option) for option in options)
        _check_kinds(kind, self._options)
        self.name = ",".join([kind.__name__, *(f"{key}={value}" for key, value in self._options.items())])
        self._of_type: dict[str, int] = {}
        try:
            _ = self._spec
        except (TypeError, ValueError, RuntimeError, UnsupportedOptimizer) as error:
            raise OptimizerError(f"optimizer {said}: {error}") from None

    def spec(self, parameters: int, threads: int) -> pb.OptimizerSpec:
        """The spec of so many parameters in one group, as a trainer with so many threads gives it."""
        made = pb.OptimizerSpec(name=self._spec.name, threads=threads)
        made.groups.add(parameters=range(parameters), options=self._spec.groups[0].options)
        return made

    def state_bytes(self, dtype: str) -> int:
        """Bytes of state for each element of a parameter; what is as small as a number is left out."""
        if dtype not in self._of_type:
            parameter = nn.Parameter(torch.zeros(_PROBED, dtype=DTYPES[dtype]))
            parameter.grad = torch.ones_like(parameter)
            optimizer = self._build(parameter)
            optimizer.step()
            state = optimizer.state[parameter].values()
            large = [v for v in state if isinstance(v, torch.Tensor) and v.shape == parameter.shape]
            self._of_type[dtype] = sum(value.element_size() for value in large)
        return self._of_type[dtype]

    @cached_property
    def _spec(self) -> pb.OptimizerSpec:
        parameter = nn.Parameter(torch.zeros(_PROBED))
        return spec_of(self._build(parameter), {parameter: 0})

    def _build(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return self._kind([parameter], **self._options)  # type: ignore[arg-type]


def _option(said: str) -> tuple[str, object]:
    key, equals, value = said.partition("=")
    if not equals:
        raise OptimizerError(f"option {said} has no value; write it as momentum=0.9")
    return key.strip(), _value(value.strip())


def _check_kinds(kind: type[torch.optim.Optimizer], options: Mapping[str, object]) -> None:
    """`OptimizerError` for an option that takes another kind of value than it has."""
    known = signature(kind).parameters
    for key, value in options.items():
        usual = known[key].default if key in known else None
        if isinstance(usual, tuple):
            raise OptimizerError(
                f"option {key} takes {len(usual)} numbers, which can't be given here; leave it out: neither "
                "state nor the time of a step depends on it"
            )
        if type(usual) in (int, float) and not isinstance(value, float):
            raise OptimizerError(f"option {key} takes a number, not {value}")


def _value(said: str) -> object:
    if said.lower() in _WORDS:
        return _WORDS[said.lower()]
    try:
        number = float(said)
    except ValueError:
        raise OptimizerError(f"{said} is no number, true, false or none") from None
    if not math.isfinite(number):
        raise OptimizerError(f"{said} is no finite number")
    return number
