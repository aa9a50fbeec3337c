"""Plain state as the bytes of `torch.save`, and back, so that no code can run. Pure."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, Final

import numpy as np
import torch

from checkmate.state.tensors import StateError

_LOOKED_AT: Final = 1000
"""Of state with more values than this it is tried whether it can be read."""

_ZIP: Final = b"PK\x03\x04"
_UNREADABLE: Final = (
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What `torch.load` raises, depending on where in the bytes the fault is."""


def dumps(obj: object, *, known: bool = False) -> bytes:
    """`torch.save` of plain state: tensors, numbers, strings, bytes, None, and containers of them.

    `StateError` where `loads` could not read it again, which reads nothing that could run code. That is
    tried, unless it is `known` or seen that all of it is plain.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        if not known and not _is_plain(obj):
            loads(buffer.getvalue())
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything while it is pickled
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StateError(
            "only tensors, NumPy arrays, numbers, strings, bytes, None, and lists, tuples and dicts of them "
            f"can be kept: {reason}"
        ) from None
    return buffer.getvalue()


def _is_plain(obj: object) -> bool:
    """Whether `loads` is sure to read it: then it needn't be tried, which takes thrice as long as writing."""
    waiting = [obj]
    for _ in range(_LOOKED_AT):
        if not waiting:
            return True
        one: Any = waiting.pop()
        kind = type(one)
        if kind is dict:
            waiting += [*one.keys(), *one.values()]
        elif kind in (list, tuple):
            waiting += one
        elif not (kind in (bool, float, str, type(None)) or (kind is int and one.bit_length() < 64)):
            return False
    return False


def loads(data: bytes) -> Any:
    """What `dumps` was given, tensors on the CPU; `StateError` where the bytes are no such state."""
    if not data.startswith(_ZIP):
        raise StateError("unreadable state: no archive of torch.save")
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise StateError(f"unreadable state: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    found = str(error).partition("WeightsUnpickler error: ")[2] or str(error) or type(error).__name__
    return found.strip().splitlines()[0]


def _numpy_globals() -> list[Any]:
    """What a pickle of NumPy arrays and numbers calls; none of it runs code of the pickle's choosing."""
    array = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}
    return [array, scalar, np.ndarray, np.dtype, *dtypes, bytes, _encode_codec()]


def _encode_codec() -> Any:
    import _codecs  # noqa: PLC0415 - by which pickle's protocol 2 spells bytes

    return _codecs.encode
