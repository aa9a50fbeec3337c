"""Checks that shadow nodes can repeat a step: all changes since the last one are in the step record."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from checkmate.state import bytes_of, in_memory_order, local_of
from checkmate.training.errors import RefusedError
from checkmate.training.record.windows import Copy, Slices, Window
from checkmate.wire.parameter import dim_order


class StepChecks:
    """Checks one optimizer and, by name, the parameters whose gradients are reduced.

    `slices`: selects parameters to check, on the group's first rank; `None` on other ranks.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], slices: Slices | None
    ) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        self._groups = self._group_ids()
        self.gradients = GradientWatch(list(names.items()))
        on_host = all(parameter.device.type == "cpu" for parameter in names.values())
        self._parameters = None if slices is None else ParameterWatch(slices, on_host=on_host)

    def check(self, arguments: Any, keywords: Any) -> None:
        """Raise `RefusedError` unless the optimizer may step with these arguments."""
        if keywords.get("closure", *arguments[1:2]) is not None:
            raise RefusedError("optimizer.step(closure) can't be followed: call backward() before step()")
        if self._group_ids() != self._groups:
            raise RefusedError(
                "the optimizer's parameter groups were changed after checkmate.protect: add parameters "
                "before it"
            )
        changed = self._parameters.changed() if self._parameters is not None else []
        if changed:
            raise RefusedError(
                f"parameter {self._names[changed[0]]} was changed between two steps, and not by the "
                "optimizer: shadow nodes can't know how. Compute values derived from a parameter in the "
                "model's forward (torch.nn.utils.parametrize), and constrain parameters through the loss or "
                "the optimizer's options. To load other weights, close the protection, and protect the model "
                "in a new DDP"
            )
        self.check_gradients()

    def stepped(self, taken: list[tuple[Window, Copy]]) -> None:
        """Note these windows of parameters after the optimizer has stepped."""
        self.gradients.forget()
        if self._parameters is not None:
            self._parameters.stepped(taken)

    def check_gradients(self) -> None:
        """Raise `RefusedError` if gradients were changed in a way that the record can't express."""
        changed = self.gradients.changed()
        if changed:
            raise RefusedError(
                f"the gradient of {changed[0]} was changed between its reduction and the optimizer's step, "
                "and shadow nodes can't know how: clip with checkmate.clip_grad_norm_ or "
                "checkmate.clip_grads_with_norm_, pass the GradScaler to checkmate.protect as scaler=, give "
                "pipeline schedules scale_grads=False, and make other changes before the reduction, in the "
                "loss or with Tensor.register_hook on parameters"
            )

    def _group_ids(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]


SAMPLE_BYTES: Final = 16 * 1024
SAMPLED: Final = 8
"""The number of gradients sampled per iteration, in rotation, and of windows of parameters."""

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class GradientWatch:
    """Samples gradients in `note`, and again in `changed`; on a CUDA device, results are an iteration late.

    It detects a change of all gradients, such as scaling or clipping, at once, and a change of a single one
    when the rotation reaches it.
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
        """Choose the gradients to sample in a new iteration, and note them."""
        count = len(self._parameters)
        first = self._round * SAMPLED
        self._round += 1
        places = range(first, first + min(SAMPLED, count))
        self._names = [self._parameters[place % count][0] for place in places]
        self._samples = [_Sample(self._parameters[place % count][1], place // count) for place in places]
        self.note()

    def note(self) -> None:
        """Accept the gradients as they are now."""
        if self._on_host:
            self._noted = [sample.copy() for sample in self._samples]
        elif self._samples:
            self._sums = self._sum()

    def forget(self) -> None:
        """Release all gradients, and check nothing until `start`."""
        self._names, self._samples, self._noted, self._sums = [], [], [], None

    def changed(self) -> list[str]:
        """Return the names of parameters whose gradients were changed; on CUDA, as of the last call."""
        if self._on_host:
            pairs = zip(self._names, self._samples, self._noted, strict=True)
            return [name for name, sample, noted in pairs if sample.copy() != noted]
        if self._sums is None:
            return self._names
        differs = self._sums != self._sum()
        return self._on_cuda(differs) if differs.is_cuda else _named(self._names, differs)

    def _on_cuda(self, differs: torch.Tensor) -> list[str]:
        """Queue the result without waiting for the device; return those that have arrived."""
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
    """Detects changes of parameters by something other than the optimizer.

    It compares `SAMPLED` of a record's windows, in rotation. Unless `on_host`, results are a step late, so
    that nothing waits for a CUDA device.
    """

    def __init__(self, slices: Slices, *, on_host: bool) -> None:
        self._slices = slices
        self._on_host = on_host
        self._round = 0
        self._left: list[tuple[Window, Copy]] = []  # after the last step
        self._late: list[tuple[Window, Copy, Copy]] = []

    def stepped(self, taken: list[tuple[Window, Copy]]) -> None:
        """Note windows as the optimizer has left them."""
        taken = [one for one in taken if not one[0].state]
        self._round += 1
        first = self._round * SAMPLED
        self._left = [taken[(first + i) % len(taken)] for i in range(min(SAMPLED, len(taken)))]

    def changed(self) -> list[int]:
        """Return the numbers of parameters changed since the last step; not on host: since the one before."""
        now = [(window, then, self._slices.copy(window)) for window, then in self._left]
        looked_at, self._late = (now, []) if self._on_host else (self._late, now)
        return [
            window.parameter
            for window, then, copy in looked_at
            if not torch.equal(then().view(torch.uint8), copy().view(torch.uint8))
        ]


class _Sample:
    """A window of a parameter's gradient: the next one at each turn of the parameter."""

    def __init__(self, parameter: nn.Parameter, turn: int) -> None:
        self._parameter = parameter
        self._turn = turn

    def copy(self) -> bytes:
        """Return its bytes in host memory; empty without a gradient."""
        gradient = self._parameter.grad
        if gradient is None:
            return b""
        own, local = local_of(self._parameter), local_of(gradient)
        if local.stride() != own.stride() or not _dense(own) or local.is_conj() or local.is_neg():
            return bytes_of(self._window(_flat(self._parameter, gradient))).tobytes()
        # It has the parameter's order in memory. A view of it as a tensor would take ten times as long.
        size = local.element_size()
        window = self._place(local.numel(), size)
        return ctypes.string_at(local.data_ptr() + window.start * size, (window.stop - window.start) * size)

    def sum(self) -> torch.Tensor:
        """Return the sum of its elements' bits as integers, as int64."""
        gradient = self._parameter.grad
        if gradient is None or not local_of(gradient).numel():
            return torch.zeros((), dtype=torch.int64, device=self._parameter.device)
        window = self._window(_flat(self._parameter, gradient))
        return window.view(_WORDS[window.element_size()]).sum()

    def _window(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self._place(flat.numel(), flat.element_size())]

    def _place(self, elements: int, size: int) -> slice:
        """Return its place among the elements of a tensor, which have `size` bytes each."""
        window = max(SAMPLE_BYTES // size, 1)
        windows = max(-(-elements // window), 1)
        start = (self._turn % windows) * window
        return slice(start, min(start + window, elements))


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory; false for some that do."""
    images = tensor.dim() == 4
    return tensor.is_contiguous() or (images and tensor.is_contiguous(memory_format=torch.channels_last))


def _named(names: Sequence[str], differs: torch.Tensor) -> list[str]:
    return [name for name, changed in zip(names, differs.tolist(), strict=True) if changed]


def _flat(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's elements in its parameter's memory order: a view if the gradient has that order."""
    own = local_of(parameter)
    ordered = in_memory_order(local_of(gradient).detach(), dim_order(own.shape, own.stride()))
    if ordered.is_contiguous():  # dimensions of size 1 may have any stride
        return ordered.as_strided((ordered.numel(),), (1,))
    return ordered.clone(memory_format=torch.contiguous_format).reshape(-1)
