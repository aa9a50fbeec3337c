"""Conversion of plain state to bytes of `torch.save`, and back without running code. Pure."""

from __future__ import annotations

import codecs
import io
import zipfile
from typing import Any, Final

import numpy as np
import torch

from checkmate.state.tensors import StateError, bytes_of

_LOOKED_AT: Final = 1000
"""State with more values than this is read back to check it."""

_ZIP: Final = b"PK\x03\x04"


def dumps(obj: object, *, known: bool = False) -> bytes:
    """Return plain state (tensors, numbers, strings, bytes, None, and containers of them) as bytes.

    Raises `StateError` if `loads`, which never runs code, could not read the result. This is tested by
    reading it, unless the state is `known` or easily seen to be plain.
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
            f"can be stored: {reason}"
        ) from None
    return buffer.getvalue()


EXTRA_STATE: Final = "_extra_state"
"""The last part of the name of what a module's `get_extra_state` returns, as in `state_dict()`."""


def is_extra_state(name: str) -> bool:
    """Return whether a name among the buffers is such state, which is `packed`."""
    return name == EXTRA_STATE or name.endswith(f".{EXTRA_STATE}")


def packed(obj: object) -> torch.Tensor:
    """Return plain state as a tensor of bytes, so that it can be kept among buffers. Raises as `dumps`."""
    return torch.frombuffer(bytearray(dumps(obj)), dtype=torch.uint8)


def unpacked(tensor: torch.Tensor) -> Any:
    """Return the argument of `packed`. Raise `StateError` if it is invalid."""
    return loads(bytes(bytes_of(tensor.contiguous())))


def _is_plain(obj: object) -> bool:
    """Return whether `loads` can certainly read it. To test that takes three times as long as writing."""
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
    """Return the argument of `dumps`, with tensors on the CPU. Raise `StateError` if it is invalid."""
    if not data.startswith(_ZIP):
        raise StateError("unreadable state: not an archive of torch.save")
    try:
        _check_stored(data)
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - depends on the location of a fault, and on what is built there
        raise StateError(f"unreadable state: {_first_line(error)}") from None


def _check_stored(data: bytes) -> None:
    """Refuse an archive that becomes larger when it is read, which PyTorch never writes."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in entries):
        raise StateError("it is compressed")
    if sum(one.file_size for one in entries) > len(data):
        raise StateError("its entries overlap")


def _first_line(error: Exception) -> str:
    found = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return next(iter(found.strip().splitlines()), type(error).__name__)


def _numpy_globals() -> list[Any]:
    """Return the globals in pickles of NumPy arrays and numbers, none of which can run arbitrary code."""
    array = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}
    # Pickle's protocol 2 uses `encode` for bytes.
    return [array, scalar, np.ndarray, np.dtype, *dtypes, bytes, codecs.encode]
