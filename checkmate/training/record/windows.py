"""Windows that rotate over parameters and optimizer state: copies for the record, which nodes compare."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import bytes_of, in_memory_order, local_of, to_number
from checkmate.training.record.buffers import copied
from checkmate.wire.layout import Layout

SLICE_BYTES: Final = 64 * 1024
PARAMETER_BYTES: Final = 16 * 1024
"""Windows of parameters alone: those above may all be of the optimizer state of one large parameter."""
LOOKED_AT_BYTES: Final = 4 * SLICE_BYTES
"""Bytes of a parameter that the script has written, which come first."""
WINDOW_BYTES: Final = 1024
"""A window counts as at least this many bytes, because even a small copy costs time."""

PLACES_MAX: Final = 4096
"""Windows whose places in memory are remembered, which are all of a small model's."""

Copy = Callable[[], Any]
"""Returns a window's earlier content, once it has arrived: bytes, a flat tensor on the CPU, or a number."""

Entry = tuple[str, int, int]
"""An entry of a parameter's state: name (empty: the parameter itself), elements, bytes per element."""


class Window(NamedTuple):
    """Elements [start, stop) of a parameter or of an entry of its state, flattened in memory order."""

    parameter: int
    state: str
    start: int
    stop: int


class Rotation:
    """Windows of `nbytes` bytes in total per iteration that rotate over some parameters."""

    def __init__(
        self,
        numbers: Sequence[int],
        entries: Callable[[int], Sequence[Entry]],
        nbytes: int = SLICE_BYTES,
        least: int | None = None,
    ) -> None:
        """Start at the first parameter. `entries` returns a parameter's entries, itself first.

        A window counts as `least` bytes at least, `WINDOW_BYTES` by default.
        """
        self._least = WINDOW_BYTES if least is None else least
        self._numbers = numbers
        self._own_numbers = frozenset(numbers)
        self._entries = entries
        self._nbytes = nbytes
        self._at = (0, 0, 0)  # indices of the parameter, its entry, and the entry's element
        self._first: list[tuple[int, str, int, int]] = []  # suspects: parameter, entry, first and last byte
        self._new_suspects: Sequence[pb.Suspect] = ()

    def look_first(self, suspects: Sequence[pb.Suspect]) -> None:
        """Begin the next windows with suspects, after earlier ones. Others' are ignored.

        Callable from any thread.
        """
        own_suspects = [suspect for suspect in suspects if suspect.parameter in self._own_numbers]
        self._new_suspects = (
            own_suspects or self._new_suspects
        )  # another node's reply names none of this shard

    def look_at(self, number: int, nbytes: int) -> None:
        """Begin the next windows with a parameter, unless there are suspects, which have to come first."""
        if number in self._own_numbers and not self._new_suspects and not self._first:
            self._first = [(number, "", 0, min(nbytes, LOOKED_AT_BYTES))]

    def next(self) -> list[Window]:
        """Return the next windows; the call after the last parameter begins again with the first.

        Suspects get at most half of the bytes, so that the others are compared even if suspects never end.
        """
        windows = self._suspects(self._nbytes // 2)
        return windows + self._further(self._nbytes - sum(self._size(window) for window in windows))

    def _suspects(self, nbytes: int) -> list[Window]:
        """Return windows of the next suspects that still exist, of about `nbytes` bytes."""
        if not self._first:
            suspects, self._new_suspects = self._new_suspects, ()
            self._first = [
                (suspect.parameter, suspect.state, suspect.start, suspect.stop) for suspect in suspects
            ]
        windows = list[Window]()
        while self._first and nbytes > 0:
            number, name, start, stop = self._first.pop(0)
            for elements, itemsize in self._sizes(number, name):
                first, last = start // itemsize, min(-(-stop // itemsize), elements)
                end = min(last, first + max(nbytes // itemsize, 1))
                if end > first:
                    windows.append(Window(number, name, first, end))
                    nbytes -= self._size(windows[-1])
                if end < last:
                    self._first.insert(0, (number, name, end * itemsize, stop))
        return windows

    def _sizes(self, number: int, name: str) -> list[tuple[int, int]]:
        return [(count, itemsize) for entry, count, itemsize in self._entries(number) if entry == name]

    def _size(self, window: Window) -> int:
        """Return the bytes that a window counts as."""
        ((_, itemsize),) = self._sizes(window.parameter, window.state)
        return max((window.stop - window.start) * itemsize, self._least)

    def _further(self, nbytes: int) -> list[Window]:
        """Return the next windows of the rotation, of about `nbytes` bytes."""
        index, entry, start = self._at
        windows = list[Window]()
        while index < len(self._numbers):
            number = self._numbers[index]
            entries = self._entries(number)
            if entry >= len(entries):
                index, entry, start = index + 1, 0, 0
                continue
            name, elements, itemsize = entries[entry]
            stop = min(elements, start + max(nbytes, 0) // itemsize)
            if stop > start:
                windows.append(Window(number, name, start, stop))
                nbytes -= max((stop - start) * itemsize, self._least)
            if stop < elements:
                self._at = (index, entry, stop)
                return windows
            entry, start = entry + 1, 0
        self._at = (0, 0, 0)
        return windows


class Slices:
    """Each iteration's slices of all shards of a model and its optimizer state."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        repeated: bool = True,
    ) -> None:
        """`repeated`: whether nodes repeat steps; else there is nothing to compare, and no slice."""
        self._orders = [parameter.dim_order for parameter in layout.parameters]
        self._parameters = parameters
        self._optimizer = optimizer
        self._places: dict[Window, _Place] = {}
        shards = [layout.of_shard(shard) for shard in range(layout.shards)] if repeated else []
        self._rotations = [Rotation(numbers, self._entries) for numbers in shards]
        cheap = all(parameter.is_cpu for parameter in parameters)  # on a device, each copy is a launch
        nbytes, least = (PARAMETER_BYTES, 64) if cheap else (SLICE_BYTES // 16, None)
        self._of_parameters = [Rotation(numbers, self._parameter_alone, nbytes, least) for numbers in shards]

    def look_first(self, suspects: Sequence[pb.Suspect]) -> None:
        """Begin the next slices of the suspects' shards with the suspects. Callable from any thread."""
        for rotation in self._rotations:
            rotation.look_first(suspects)

    def look_at(self, numbers: Sequence[int]) -> None:
        """Begin the next slices with parameters that the script has written."""
        for number in numbers:
            for rotation in self._rotations:
                rotation.look_at(number, local_of(self._parameters[number]).nbytes)

    def again(self, copies: Sequence[tuple[Window, Copy]]) -> list[tuple[Window, Copy]]:
        """Copy windows again, without those of state that does not exist any more."""
        now = list[tuple[Window, Copy]]()
        for window, _ in copies:
            with suppress(KeyError):
                now.append((window, self.copy(window)))
        return now

    def take(self) -> list[tuple[Window, Copy]]:
        """Return the next windows, each with its copy."""
        return [(window, self.copy(window)) for rotation in self._rotations for window in rotation.next()]

    def take_parameters(self) -> list[tuple[Window, Copy]]:
        """Return windows of parameters alone, in a rotation of their own, each with its copy."""
        return [(window, self.copy(window)) for rotation in self._of_parameters for window in rotation.next()]

    def copy(self, window: Window) -> Copy:
        """Copy a window as it is now. Raise `KeyError` if the optimizer has no such state any more."""
        value = self._value(window)
        place = self._places.get(window)
        if place is not None and place.holds(value):
            data = ctypes.string_at(place.address, place.nbytes)
            return lambda: data
        if not isinstance(value, torch.Tensor):
            return lambda: value
        local = local_of(value).detach()
        whole = value.shape == self._parameters[window.parameter].shape
        ordered = in_memory_order(local, self._orders[window.parameter] if whole else ())
        if not (local.is_cpu and ordered.is_contiguous() and window.stop > window.start):
            return copied(ordered.reshape(-1)[window.start : window.stop])
        # Its elements are in memory one after another. A view as a tensor would take ten times as long.
        size, begin = local.element_size(), local.data_ptr()
        address, nbytes = begin + window.start * size, (window.stop - window.start) * size
        if local_of(value) is value:
            if len(self._places) >= PLACES_MAX:
                self._places.clear()
            self._places[window] = _Place(value, value.numel(), begin, address, nbytes)
        data = ctypes.string_at(address, nbytes)
        return lambda: data

    def _value(self, window: Window) -> Any:
        parameter = self._parameters[window.parameter]
        return self._optimizer.state.get(parameter, {})[window.state] if window.state else parameter

    def _entries(self, number: int) -> list[Entry]:
        parameter = self._parameters[number]
        values = {"": parameter, **self._optimizer.state.get(parameter, {})}
        return [
            (name, local_of(value).numel(), value.element_size())
            if isinstance(value, torch.Tensor)
            else (name, 1, 1)
            for name, value in values.items()
        ]

    def _parameter_alone(self, number: int) -> list[Entry]:
        local = local_of(self._parameters[number])
        return [("", local.numel(), local.element_size())]


class _Place(NamedTuple):
    """The place of a window of a tensor on the CPU, as long as the tensor begins there."""

    tensor: torch.Tensor
    numel: int
    begin: int
    address: int
    nbytes: int

    def holds(self, value: object) -> bool:
        """Return whether `value` is that tensor, and still there, and still as large."""
        tensor = self.tensor
        return tensor is value and tensor.data_ptr() == self.begin and tensor.numel() == self.numel


def to_message(window: Window, value: object) -> pb.Slice:
    """Return a window's copy as a message. Raise `StateError` if it is neither a tensor nor a number."""
    message = pb.Slice(parameter=window.parameter, state=window.state)
    if isinstance(value, bytes):
        elements = window.stop - window.start
        message.offset, message.data = window.start * (len(value) // max(elements, 1)), value
    elif isinstance(value, torch.Tensor):
        message.offset, message.data = window.start * value.element_size(), bytes(bytes_of(value))
    else:
        message.number.CopyFrom(to_number(window.state, value))
    return message
