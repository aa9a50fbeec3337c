"""Digests of training states: equal if all tensors have the same bits and all else is equal. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch


def digest(state: object) -> bytes:
    """Return a digest of 16 bytes of a state: nested `state_dict`s."""
    made = hashlib.blake2b(digest_size=16)
    for part in _parts(state):
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.digest()


def _parts(value: object) -> Iterator[bytes | memoryview]:
    """Yield the parts of a value, each preceded by its type; tensors as bytes."""
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
