"""A parameter that training reduces, or a chunk of one, and its description on the wire. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from checkmate.errors import CheckmateError

ELEMENTS_MAX: Final = 1 << 48
DIMENSIONS_MAX: Final = 64
"""Limits of a parameter in a description, well beyond any real one."""

ITEMSIZES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Supported types of gradients, by their name in torch, and bytes per element."""

STATE_ITEMSIZES: Final = {
    **ITEMSIZES,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Supported types of optimizer state that is copied, and bytes per element."""


class LayoutError(CheckmateError, ValueError):
    """Parameters have no valid layout."""


def dim_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's dimensions from outermost to innermost in memory; empty if that is row-major.

    Dimensions of size 1 come first, so that equal memory gives equal orders. Raises `LayoutError` if elements
    overlap or have gaps between them.
    """
    if 0 in shape:
        return ()
    wide = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    nearer = 1
    for dimension in reversed(wide):
        if strides[dimension] != nearer:
            words = f"shape {tuple(shape)}, strides {tuple(strides)}"
            raise LayoutError(f"its elements overlap or have gaps between them: {words}")
        nearer *= shape[dimension]
    if wide == sorted(wide):
        return ()
    return (*(d for d in range(len(shape)) if shape[d] == 1), *wide)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that training reduces: its name in the model (without DDP's prefix), shape and type.

    Its gradient and its state on shadow nodes are in memory order: like the contiguous tensor
    `parameter.permute(dim_order)`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dim_order: tuple[int, ...] = ()
    """Its dimensions from outermost to innermost in memory; empty if row-major."""
    whole: tuple[int, ...] = ()
    """If it is a chunk of a sharded parameter, the shape of that; else empty."""
    offset: tuple[int, ...] = ()
    """If it is a chunk, where in the whole parameter it begins, in each dimension; else empty."""
    gradient: str = ""
    """The type in which its gradient is reduced, if it is not its own; a step casts the gradient to that."""
    state: str = ""
    """If it is copied optimizer state, which entry of the state of the parameter `name`; else ""."""
    owner: tuple[int, ...] = ()
    """If only one rank of its DP group has it, that one's position; else empty."""

    @classmethod
    def of(cls, name: str, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Parameter:
        """Return the parameter with this layout in memory. Raise `LayoutError` if it is not dense."""
        try:
            return cls(name, tuple(shape), dtype, dim_order(shape, strides))
        except LayoutError as error:
            raise LayoutError(f"{name} cannot be protected: {error}; make it contiguous()") from None

    @property
    def gradient_dtype(self) -> str:
        """The type in which its gradient is reduced."""
        return self.gradient or self.dtype

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape of the contiguous tensor in memory."""
        return tuple(self.shape[d] for d in self.dim_order) if self.dim_order else self.shape

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.elements * STATE_ITEMSIZES[self.dtype]


_FIELDS: Final = tuple(field.name for field in fields(Parameter))
_NEEDLESS: Final = frozenset({"whole", "offset", "gradient", "state", "owner"})


def described(parameter: Parameter) -> dict[str, Any]:
    """Return a parameter's fields, without those that it does not need."""
    values = ((name, getattr(parameter, name)) for name in _FIELDS)
    return {name: value for name, value in values if value or name not in _NEEDLESS}


def parameter_of(document: Any) -> Parameter:
    """Return a parameter of a description. Raise `TypeError`, `KeyError` or `ValueError` if it is not one."""
    name, dtype = document["name"], document["dtype"]
    gradient, state = document.get("gradient", ""), document.get("state", "")
    if not all(isinstance(text, str) for text in (name, dtype, gradient, state)):
        raise TypeError("a parameter's name and types must be strings")
    parameter = Parameter(
        name,
        numbers(document["shape"]),
        dtype,
        numbers(document["dim_order"]),
        numbers(document.get("whole", [])),
        numbers(document.get("offset", [])),
        gradient,
        state,
        numbers(document.get("owner", [])),
    )
    if len(parameter.shape) > DIMENSIONS_MAX:
        raise ValueError(f"{name} has {len(parameter.shape)} dimensions, more than {DIMENSIONS_MAX}")
    if math.prod(max(size, 1) for size in parameter.shape) > ELEMENTS_MAX:
        raise ValueError(f"{name} has more than {ELEMENTS_MAX} elements")
    if len(parameter.owner) > 1:
        raise ValueError(f"{name} has {len(parameter.owner)} owners")
    return parameter


def numbers(document: Any) -> tuple[int, ...]:
    """Return a list of numbers as a tuple. Raise `TypeError` if it contains anything else."""
    if not isinstance(document, list) or not all(
        type(number) is int and 0 <= number <= ELEMENTS_MAX for number in document
    ):
        raise TypeError(f"sizes must be a list of numbers from 0 to {ELEMENTS_MAX}")
    return tuple(document)
