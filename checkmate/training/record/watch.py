"""Tells whether gradients were changed between DDP's reduction and the optimizer's step (design, section 7).

And whether parameters were, between two steps.

Samples of the bytes, not `Tensor._version`: that misses changes made through `.data` or NumPy, and counts
some that change nothing, such as clipping what needs no clipping. In host memory the samples themselves are
compared, on a CUDA device their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from checkmate.state import bytes_of, in_memory_order
from checkmate.training.record.windows import Copy, Slices, Window
from checkmate.wire.layout import dim_order

SAMPLE_BYTES: Final = 16 * 1024
SAMPLED: Final = 8
"""So many parameters' gradients an iteration are looked at, in rotation: each a sample, at a place that moves
too; and so many windows of parameters.
"""

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class GradientWatch:
    """Looks with `note`, and again with `changed`; on a CUDA device the answer comes an iteration late.

    A change to all gradients, as by scaling or clipping, is seen at once; one to a single parameter's when
    its turn comes.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._on_host = all(parameter.device.type == "cpu" for _, parameter in parameters)
        self._round = 0
        self._names: list[str] = []
        self._samples: list[_Sample] = []
        self._noted: list[bytes] = []
        self._sums: torch.Tensor | None = None
        self._late: list[tuple[list[str], torch.Tensor, torch.cuda.Event]] = []

    def start(self) -> None:
        """A new iteration: choose what to look at, and note it."""
        count = len(self._parameters)
        first = self._round * SAMPLED
        self._round += 1
        chosen = [self._parameters[(first + i) % count] for i in range(min(SAMPLED, count))]
        self._names = [name for name, _ in chosen]
        self._samples = [_Sample(parameter, self._round) for _, parameter in chosen]
        self.note()

    def note(self) -> None:
        """What the gradients are now is right."""
        if self._on_host:
            self._noted = [sample.copy() for sample in self._samples]
        elif self._samples:
            self._sums = self._sum()

    def forget(self) -> None:
        """Hold no gradient any longer; nothing is looked at until `start`."""
        self._names, self._samples, self._noted, self._sums = [], [], [], None

    def changed(self) -> list[str]:
        """The names of parameters whose gradients aren't what was noted; on CUDA, those of the last call."""
        if self._on_host:
            pairs = zip(self._names, self._samples, self._noted, strict=True)
            return [name for name, sample, noted in pairs if sample.copy() != noted]
        if self._sums is None:
            return self._names
        differs = self._sums != self._sum()
        return self._on_cuda(differs) if differs.is_cuda else _named(self._names, differs)

    def _on_cuda(self, differs: torch.Tensor) -> list[str]:
        """Queue the answer, without waiting for the device; give those that have arrived."""
        arrived = [entry for entry in self._late if entry[2].query()]  # type: ignore[no-untyped-call]
        self._late = self._late[len(arrived) :]  # they arrive in order
        host = torch.empty(differs.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(differs, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._late.append((self._names, host, event))
        return [name for names, flags, _ in arrived for name in _named(names, flags)]

    def _sum(self) -> torch.Tensor:
        return torch.stack([sample.sum() for sample in self._samples])


class ParameterWatch:
    """Tells whether something else than the optimizer changed parameters, of which records have windows.

    Of these it looks at `SAMPLED`, in rotation. Not `on_host`, the answer comes a step late: nothing waits
    for a CUDA device.
    """

    def __init__(self, slices: Slices, *, on_host: bool) -> None:
        self._slices = slices
        self._on_host = on_host
        self._round = 0
        self._left: list[tuple[Window, Copy]] = []  # by the last step
        self._late: list[tuple[Window, Copy, Copy]] = []

    def stepped(self, taken: list[tuple[Window, Copy]]) -> None:
        """The optimizer has left these."""
        taken = [one for one in taken if not one[0].state]
        self._round += 1
        first = self._round * SAMPLED
        self._left = [taken[(first + i) % len(taken)] for i in range(min(SAMPLED, len(taken)))]

    def changed(self) -> list[int]:
        """The numbers of parameters that aren't what the last step left; not on host, the one before it."""
        now = [(window, then, self._slices.copy(window)) for window, then in self._left]
        looked_at, self._late = (now, []) if self._on_host else (self._late, now)
        return [window.parameter for window, then, copy in looked_at if not _same_bits(then(), copy())]


def _same_bits(one: object, other: object) -> bool:
    """Of flat tensors of one type."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        raise TypeError("parameters are tensors")
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class _Sample:
    """A window of a parameter's gradient; its place follows the round."""

    def __init__(self, parameter: nn.Parameter, round_: int) -> None:
        self._parameter = parameter
        self._round = round_
        self._seen: torch.Tensor | None = None  # the gradient whose memory `_bytes` is,
        self._where: tuple[int, tuple[int, ...]] = (0, ())  # while it lies here
        self._bytes = memoryview(b"")

    def copy(self) -> bytes:
        """Its bytes, in host memory; none where there is no gradient."""
        gradient = self._parameter.grad
        if gradient is None:
            return b""
        where = (gradient.data_ptr(), gradient.stride())
        if self._seen is not gradient or self._where != where:
            flat = _flat(self._parameter, gradient)
            self._bytes = bytes_of(self._window(flat))
            self._seen = gradient if flat.data_ptr() == gradient.data_ptr() else None  # a copy never changes
            self._where = where
        return self._bytes.tobytes()

    def sum(self) -> torch.Tensor:
        """The sum of its bytes, as int64."""
        gradient = self._parameter.grad
        if gradient is None or not gradient.numel():
            return torch.zeros((), dtype=torch.int64, device=self._parameter.device)
        window = self._window(_flat(self._parameter, gradient))
        return window.view(_WORDS[window.element_size()]).sum()

    def _window(self, flat: torch.Tensor) -> torch.Tensor:
        window = max(SAMPLE_BYTES // flat.element_size(), 1)
        windows = max(-(-flat.numel() // window), 1)
        start = (self._round % windows) * window
        return flat[start : start + window]


def _named(names: Sequence[str], differs: torch.Tensor) -> list[str]:
    return [name for name, changed in zip(names, differs.tolist(), strict=True) if changed]


def _flat(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient in its parameter's memory order: in place if the gradient lies so too."""
    ordered = in_memory_order(gradient.detach(), dim_order(parameter.shape, parameter.stride()))
    if ordered.is_contiguous():  # dimensions of size 1 may have any stride
        return ordered.as_strided((ordered.numel(),), (1,))
    return ordered.clone(memory_format=torch.contiguous_format).reshape(-1)
