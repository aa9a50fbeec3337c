"""The text: Python's own `help()` topics, which every installation has, or a given file."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import torch


class Text:
    """Bytes, and random batches of them."""

    def __init__(self, data: bytes) -> None:
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def batch(self, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64 of shape (size, context), from random places."""
        starts = torch.randint(len(self.data) - context, (size, 1))
        window = self.data[starts + torch.arange(context + 1)].long()
        return window[:, :-1], window[:, 1:]


def read(file: Path | None = None) -> Text:
    """Return the text of a file, by default Python's own documentation (about half a million bytes)."""
    if file is not None:
        return Text(file.read_bytes())
    return Text("\n".join(topics[name] for name in sorted(topics)).encode())
