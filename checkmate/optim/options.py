"""A parameter group's options as exact JSON: floats to the last bit, tuples, tensors, NumPy's numbers.

JSON has no tuples, tensors or infinities. Each is an object with one key that specifies its type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

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
    said: dict[str, object] = {}
    for key, value in group.items():
        if key in OUTSIDE:
            continue
        try:
            said[key] = _encode(value)
        except OptionsError as error:
            raise OptionsError(f"option {key!r} is {error}") from None
    return json.dumps(said, allow_nan=False)


def parse_options(text: str) -> dict[str, Any]:
    """Return the options that `options_of` wrote. Raise `OptionsError` if the text is invalid."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError("no object")
        return {key: _decode(value) for key, value in found.items() if key not in OUTSIDE}
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
        there = group.get(key)
        if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
            if (there.dtype, there.shape) == (value.dtype, value.shape):
                with torch.no_grad():
                    there.copy_(value)
                continue
            group[key] = value.to(there.device)
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


def _decode_tensor(said: Any) -> torch.Tensor:
    dtype = getattr(torch, said["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"no dtype {said['dtype']}")
    data = bytearray.fromhex(said["data"])
    if not data:
        return torch.empty(0, dtype=dtype).reshape(said["shape"])
    return torch.frombuffer(data, dtype=dtype).reshape(said["shape"])


def _decode_float(said: Any) -> float:
    if said not in ("nan", "inf", "-inf"):
        raise ValueError(f"no float {said}")
    return float(said)


def _decode_numpy(said: Any) -> np.generic:
    name, value = said
    if name not in np.sctypeDict or not _is_number(np.dtype(name)):
        raise ValueError("no type of NumPy's numbers")
    found = np.dtype(name).type(_decode(value))
    if not isinstance(found, np.generic):
        raise TypeError("no number")
    return found


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.itemsize <= 8


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": lambda said: tuple(_decode(item) for item in said),
    "dict": lambda said: {_decode(key): _decode(item) for key, item in said},
    "tensor": _decode_tensor,
    "numpy": _decode_numpy,
    "float": _decode_float,
}
