"""A parameter group's options as exact JSON: floats to the last bit, tuples, tensors, NumPy's numbers.

JSON has no tuples, tensors or infinities. Each is an object with one key that specifies its type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

OUTSIDE: Final = ("params", "param_names")
"""Keys of a group that are not options but list its parameters."""


class OptionsError(ValueError):
    """Options cannot be stored as JSON, or a text does not contain options."""


def options_of(group: Mapping[str, Any]) -> str:
    """Return a parameter group's options (all but its parameters) as JSON.

    `parse_options` restores every value with its type and bits. Raises `OptionsError` if the type of an
    option is not supported.
    """
    options: dict[str, object] = {}
    for key, value in group.items():
        if key in OUTSIDE:
            continue
        try:
            options[key] = _encode(value)
        except OptionsError as error:
            raise OptionsError(f"option {key!r} is {error}") from None
    return json.dumps(options, allow_nan=False)


class GroupOptions:
    """Parameter groups' options as JSON, written again only for groups whose values are other objects.

    A script may have thousands of groups, and they are recorded twice in each iteration.
    """

    def __init__(self) -> None:
        self._texts: list[_GroupText] = []

    def of(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return each group's `options_of`. Raises as that does."""
        del self._texts[len(groups) :]
        for number, group in enumerate(groups):
            ids = tuple(map(id, group.values()))
            if number == len(self._texts):
                self._texts.append(_GroupText.from_group(group, ids))
            elif self._texts[number].ids != ids:
                self._texts[number] = _GroupText.from_group(group, ids)
        return [text.text for text in self._texts]


class _GroupText(NamedTuple):
    """A group's options as text, until one of its values is another object."""

    ids: tuple[int, ...]
    """Ids of the values; empty if one can change in place, so that the text is never used again."""
    values: Sequence[object]
    """Kept, so that no other object gets one of these ids."""
    text: str

    @classmethod
    def from_group(cls, group: Mapping[str, Any], ids: tuple[int, ...]) -> _GroupText:
        constant = all(key in OUTSIDE or _is_constant(value) for key, value in group.items())
        return cls(ids if constant else (), list(group.values()), options_of(group))


_CONSTANT: Final = frozenset((bool, float, int, str, type(None)))


def _is_constant(value: object) -> bool:
    """Return whether a value can't change in place: also a tuple of such values, as betas are."""
    return type(value) in _CONSTANT or (
        isinstance(value, tuple) and all(type(member) in _CONSTANT for member in value)
    )


def parse_options(text: str) -> dict[str, Any]:
    """Return the options that `options_of` wrote. Raise `OptionsError` if the text is invalid."""
    try:
        options = json.loads(text)
        if not isinstance(options, dict):
            raise TypeError("no object")
        return {key: _decode(value) for key, value in options.items() if key not in OUTSIDE}
    except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise OptionsError(f"not a parameter group's options: {error}") from None


def apply_options(group: MutableMapping[str, Any], text: str) -> None:
    """Set a parameter group's options to those that `options_of` wrote. Its parameters do not change.

    A tensor (such as a learning rate) is updated in place if dtype and shape are the same, so that other
    references to it see the new value.
    """
    put_options(group, parse_options(text))


def put_options(group: MutableMapping[str, Any], options: Mapping[str, Any]) -> None:
    """Set a parameter group's options, like `apply_options`, but from parsed ones."""
    for key, value in options.items():
        present = group.get(key)
        if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
            if (present.dtype, present.shape) == (value.dtype, value.shape):
                with torch.no_grad():
                    present.copy_(value)
                continue
            group[key] = value.to(present.device)
        else:
            group[key] = value


def _encode(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return {"tensor": _encode_tensor(value)}
    if isinstance(value, np.generic):
        if not _is_number(value.dtype):
            raise OptionsError(f"a NumPy {value.dtype}, which is not supported; use a Python number")
        return {"numpy": [value.dtype.name, _encode(value.item())]}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, torch.dtype):
        return {"type": str(value).removeprefix("torch.")}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) in (list, tuple):
        items = [_encode(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if type(value) is dict:
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise OptionsError(
        f"of type {kind}, which is not supported; use numbers, strings, None, tensors, or tuples, lists and "
        "dicts of them"
    )


def _encode_tensor(value: torch.Tensor) -> dict[str, object]:
    value = value.detach().cpu().contiguous()
    data = value.view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "data": data.hex()}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return _DECODERS[kind](inner)


def _decode_tensor(fields: Any) -> torch.Tensor:
    dtype = _decode_type(fields["dtype"])
    data = bytearray.fromhex(fields["data"])
    if not data:
        return torch.empty(0, dtype=dtype).reshape(fields["shape"])
    return torch.frombuffer(data, dtype=dtype).reshape(fields["shape"])


def _decode_type(name: Any) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"no dtype {name}")
    return dtype


def _decode_float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"no float {text}")
    return float(text)


def _decode_numpy(pair: Any) -> np.generic:
    name, value = pair
    if name not in np.sctypeDict or not _is_number(np.dtype(name)):
        raise ValueError("no type of NumPy's numbers")
    number = np.dtype(name).type(_decode(value))
    if not isinstance(number, np.generic):
        raise TypeError("no number")
    return number


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.itemsize <= 8


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": lambda items: tuple(_decode(item) for item in items),
    "dict": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
    "tensor": _decode_tensor,
    "type": _decode_type,
    "numpy": _decode_numpy,
    "float": _decode_float,
}
