"""Supported tensors in state, and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""Supported types of tensors, by name."""


class StateError(ValueError):
    """State cannot be converted, or received data is invalid."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a writable view, without a copy."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return memoryview(bytearray())
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # a single element may have any stride, and `view` wants 1
    data: Any = flat.view(torch.uint8).numpy()  # a buffer, though not according to NumPy's types
    return memoryview(data)
