"""Optimizers by name, such as `adamw` or `sgd,momentum=0.9`: their spec and size of state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Final

import torch
from torch import nn

from checkmate.optim.supported import UnsupportedOptimizer, copied_spec_of, optimizer_classes, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import DTYPES, leaves

_WORDS: Final[Mapping[str, object]] = {"true": True, "false": False, "none": None}
_PROBED: Final = 64
"""Elements of a parameter that is stepped to measure its state."""
_PROBED_SIDE: Final = 256
"""Rows and columns of one whose state is copied."""


class OptimizerError(ValueError):
    """An optimizer or its options are unknown."""

    exit_code = 2


class NamedOptimizer:
    """An optimizer, with its options: one whose steps shadow nodes repeat, or whose state is copied."""

    def __init__(self, text: str) -> None:
        """Parse `NAME[,OPTION=VALUE...]`. Raise `OptimizerError` if there is none of that name.

        Others than those whose steps are repeated are torch's, by name, or `module:Class`.
        """
        name, *options = text.split(",")
        by_name = {kind.__name__.lower(): kind for kind in optimizer_classes()}
        kind = by_name.get(name.strip().lower())
        self.copied = kind is None
        """Whether its state is copied, because its steps can't be repeated."""
        if kind is None:
            kind = _other_kind(name.strip())
        if kind is None:
            names = ", ".join(by_name)
            raise OptimizerError(
                f"no optimizer {name}; shadow nodes repeat the steps of {names}, and store copies of the "
                "state of torch.optim's others and of module:Class"
            )
        self._kind = kind
        self._options = dict(_option(option) for option in options)
        _check_kinds(kind, self._options)
        self.name = ",".join([kind.__name__, *(f"{key}={value}" for key, value in self._options.items())])
        self._of_type: dict[str, int] = {}
        try:
            _ = self._spec
        except (TypeError, ValueError, RuntimeError, UnsupportedOptimizer) as error:
            raise OptimizerError(f"optimizer {text}: {error}") from None

    def spec(self, parameters: int, threads: int) -> pb.OptimizerSpec:
        """Return the spec of one group of N parameters, as from a trainer with N threads."""
        spec_message = pb.OptimizerSpec(name=self._spec.name, threads=threads)
        spec_message.groups.add(parameters=range(parameters), options=self._spec.groups[0].options)
        return spec_message

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of state for each element of a parameter, without scalars."""
        if dtype not in self._of_type:
            parameter = self._parameter(dtype)
            parameter.grad = torch.ones_like(parameter)
            optimizer = self._build(parameter)
            optimizer.step()
            tensors = [leaf.value for leaf in leaves(optimizer.state[parameter])]
            # What is copied has a matrix's rows, columns and products, too, which count as the probed one's.
            counted = [v for v in tensors if isinstance(v, torch.Tensor)]
            counted = [v for v in counted if self.copied or v.shape == parameter.shape]
            self._of_type[dtype] = round(sum(value.nbytes for value in counted) / parameter.numel())
        return self._of_type[dtype]

    @cached_property
    def _spec(self) -> pb.OptimizerSpec:
        parameter = self._parameter("float32")
        describe = copied_spec_of if self.copied else spec_of
        return describe(self._build(parameter), {parameter: 0})

    def _parameter(self, dtype: str) -> nn.Parameter:
        """Return a parameter to probe with: a matrix if the state is copied, which may depend on that."""
        shape = (_PROBED_SIDE, _PROBED_SIDE) if self.copied else (_PROBED,)
        return nn.Parameter(torch.zeros(shape, dtype=DTYPES[dtype]))

    def _build(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return self._kind([parameter], **self._options)  # type: ignore[arg-type]


def _other_kind(name: str) -> type[torch.optim.Optimizer] | None:
    """Return an optimizer of torch by name, or `module:Class`; `None` if there is none."""
    module, colon, attribute = name.partition(":")
    if colon:
        try:
            kind = getattr(import_module(module), attribute, None)
        except ImportError as error:
            raise OptimizerError(f"optimizer {name}: {error}") from None
        return kind if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) else None
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    of_torch = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)]
    return next((kind for kind in of_torch if kind.__name__.lower() == name.lower()), None)


def _option(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise OptimizerError(f"option {text} has no value; write it like momentum=0.9")
    return key.strip(), _value(value.strip())


def _check_kinds(kind: type[torch.optim.Optimizer], options: Mapping[str, object]) -> None:
    """Raise `OptimizerError` if an option's value has the wrong type."""
    parameters = signature(kind).parameters
    for key, value in options.items():
        usual = parameters[key].default if key in parameters else None
        if isinstance(usual, tuple):
            raise OptimizerError(
                f"option {key} takes {len(usual)} numbers, which is not supported; leave it out: neither "
                "state nor the time of a step depends on it"
            )
        if type(usual) in (int, float) and not isinstance(value, float):
            raise OptimizerError(f"option {key} takes a number, not {value}")


def _value(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        number = float(text)
    except ValueError:
        raise OptimizerError(f"{text} is not a number, true, false or none") from None
    if not math.isfinite(number):
        raise OptimizerError(f"{text} is not a finite number")
    return number
