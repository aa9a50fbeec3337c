"""Tensors as pieces of bytes that ranks send each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
import xxhash

from checkmate.state import bytes_of

PIECE_BYTES: Final = 4 << 20
"""What a rank sends at once, at most."""
PACKED_BELOW: Final = 64 << 10
"""Tensors of fewer bytes are sent together, because each broadcast takes time. Larger ones are not copied."""


class SentPiece:
    """Bytes that are sent at once: a part of one tensor, or several small tensors."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self.bytes = views[0]
        """All of them, in order. They are the tensor's own if there is only one."""
        if len(views) > 1:
            self._lengths = [view.nbytes for view in views]
            self.bytes = torch.empty(sum(self._lengths), dtype=torch.uint8)

    def give(self) -> None:
        """Copy the tensors to `bytes`."""
        if len(self._views) > 1:
            torch.cat(list(self._views), out=self.bytes)

    def take(self) -> None:
        """Copy `bytes` to the tensors."""
        if len(self._views) > 1:
            for view, part in zip(self._views, self.bytes.split_with_sizes(self._lengths), strict=True):
                view.copy_(part)


class TensorBytes:
    """The bytes of a sequence of tensors, with memory to send or receive them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._flats = [one.contiguous().reshape(-1).view(torch.uint8) for one in tensors if one.nbytes]
        self.pieces = [SentPiece(views) for views in _cut(self._flats)]

    def digest(self) -> str:
        """Return XXH3 of all bytes: it finds accidents."""
        hashed = xxhash.xxh3_128()
        for flat in self._flats:
            hashed.update(bytes_of(flat))
        return hashed.hexdigest()


def _cut(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the views of which pieces consist: large tensors in parts, small ones together."""
    small: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors:
        for view in torch.split(tensor, PIECE_BYTES) if tensor.nbytes > PIECE_BYTES else (tensor,):
            length = view.nbytes
            if length >= PACKED_BELOW:
                yield [view]
                continue
            if nbytes + length > PIECE_BYTES:
                yield small
                small, nbytes = [], 0
            small.append(view)
            nbytes += length
    if small:
        yield small
