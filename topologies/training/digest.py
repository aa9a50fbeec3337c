"""A digest of a training state: equal where tensors have the same bits, and all else is equal. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch


def digest(state: object) -> bytes:
    """16 bytes that tell states (`state_dict`s, nested as they come) apart."""
    made = hashlib.blake2b(digest_size=16)
    for part in _parts(state):
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.digest()


def _parts(value: object) -> Iterator[bytes | memoryview]:
    """Every part begins with what it is; tensors are given as bytes, whatever their type."""
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data.cast("B")
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in value:
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)}".encode()
        for one in value:
            yield from _parts(one)
    else:
        yield f"{type(value).__name__} {value!r}".encode()
