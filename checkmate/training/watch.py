"""Tells whether gradients were changed between DDP's reduction and the optimizer's step (design, section 7).

Sums over samples of the bytes, not `Tensor._version`: that misses changes made through `.data` or NumPy, and
counts some that change nothing, such as clipping what needs no clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

SAMPLE_BYTES: Final = 16 * 1024
SAMPLED: Final = 8
"""So many parameters an iteration are looked at, in rotation: each a sample, at a place that moves too."""

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class GradientWatch:
    """Takes sums with `note`, and again with `changed`; on a CUDA device the answer comes an iteration late.

    A change to all gradients, as by scaling or clipping, is seen at once; one to a single parameter's when
    its turn comes.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._round = 0
        self._chosen: list[tuple[str, nn.Parameter]] = []
        self._sums: torch.Tensor | None = None
        self._late: list[tuple[list[str], torch.Tensor, torch.cuda.Event]] = []

    def start(self) -> None:
        """A new iteration: choose what to look at, and note it."""
        count = len(self._parameters)
        first = self._round * SAMPLED
        self._round += 1
        self._chosen = [self._parameters[(first + i) % count] for i in range(min(SAMPLED, count))]
        self.note()

    def note(self) -> None:
        """What the gradients are now is right."""
        self._sums = self._sum()

    def changed(self) -> list[str]:
        """The names of parameters whose gradients aren't what was noted; on CUDA, those of the last call."""
        before, now = self._sums, self._sum()
        if before is None or before.shape != now.shape:
            return [name for name, _ in self._chosen]
        differs = before != now
        if not differs.is_cuda:
            return self._named([name for name, _ in self._chosen], differs)
        return self._on_cuda(differs)

    def _on_cuda(self, differs: torch.Tensor) -> list[str]:
        """Queue the answer, without waiting for the device; give those that have arrived."""
        arrived = [entry for entry in self._late if entry[2].query()]  # type: ignore[no-untyped-call]
        self._late = self._late[len(arrived) :]  # they arrive in order
        host = torch.empty(differs.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(differs, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._late.append(([name for name, _ in self._chosen], host, event))
        return [name for names, flags, _ in arrived for name in self._named(names, flags)]

    @staticmethod
    def _named(names: Sequence[str], differs: torch.Tensor) -> list[str]:
        return [name for name, changed in zip(names, differs.tolist(), strict=True) if changed]

    def _sum(self) -> torch.Tensor:
        return torch.stack([self._sample(parameter) for _, parameter in self._chosen])

    def _sample(self, parameter: nn.Parameter) -> torch.Tensor:
        """The sum of a window of the gradient's bytes, as int64; its place follows the round."""
        gradient = parameter.grad
        if gradient is None or not gradient.numel():
            return torch.zeros((), dtype=torch.int64, device=parameter.device)
        flat = gradient.detach().reshape(-1) if gradient.is_contiguous() else _dense(gradient)
        window = max(SAMPLE_BYTES // flat.element_size(), 1)
        windows = -(-flat.numel() // window)
        start = (self._round % windows) * window
        return flat[start : start + window].view(_WORDS[flat.element_size()]).sum()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient in the order of their memory where it has no holes, else a copy."""
    size = gradient.numel()
    if gradient.is_contiguous(memory_format=torch.channels_last) and gradient.dim() == 4:
        return gradient.detach().as_strided((size,), (1,), gradient.storage_offset())
    return gradient.detach().reshape(-1)
