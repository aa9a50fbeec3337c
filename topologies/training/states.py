"""Training states, which are nested `state_dict`s: their leaves, differences and digests. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def leaves(state: object, path: str = "") -> Sequence[tuple[str, object]]:
    """Return every leaf of a nested state, with its path."""
    if isinstance(state, Mapping):
        return [leaf for key in state for leaf in leaves(state[key], f"{path}.{key}".lstrip("."))]
    if isinstance(state, list | tuple):
        return [leaf for i, one in enumerate(state) for leaf in leaves(one, f"{path}.{i}".lstrip("."))]
    return [(path, state)]


def differences(one: object, other: object) -> list[str]:
    """Return the paths at which two states differ."""
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    return [
        key
        for key in {**ours, **theirs}
        if key not in ours or key not in theirs or not _equal(ours[key], theirs[key])
    ]


def digest(state: object) -> bytes:
    """Return a digest of 16 bytes: equal if all tensors have the same bits and all else is equal."""
    made = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(state):
        for part in (path.encode(), _bits(leaf)):
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
    return made.digest()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _bits(leaf: object) -> bytes:
    """Return a leaf's type and value, and a tensor's shape."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
        return f"tensor {leaf.dtype} {tuple(leaf.shape)} ".encode() + flat.numpy().tobytes()
    return f"{type(leaf).__name__} {leaf!r}".encode()
