"""Which tensors state may have, and their bytes."""

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
"""Types that a tensor of a parameter or its state may have."""


class StateError(ValueError):
    """State that can't be sent, or what came is not what was sent."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writing them writes the tensor."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return memoryview(bytearray())
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # a single element may have any stride, and `view` wants 1
    data: Any = flat.view(torch.uint8).numpy()  # a buffer, as NumPy's types don't say
    return memoryview(data)
