"""Copies of buffers and frozen parameters for the step record, as they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import nn

from checkmate.state import bytes_of, is_extra_state, is_frozen_state, local_of, name_frozen

_log: Final = logging.getLogger("checkmate")

EXACT_BYTES: Final = 1 << 20
"""Buffers up to this size are compared by content: BatchNorm changes its own without raising the version."""
FIRST_BYTES: Final = 4 << 20
"""A record carries about this much of buffers that were never sent."""
ALL_BYTES: Final = 200 << 20
"""The total that fits into a record; beyond it, the largest buffers and frozen parameters are left out."""

LOOKED_AT: Final = 8
"""Large buffers and frozen parameters of which a sample is compared in an iteration, in turn."""
ROUNDS: Final = 4
SAMPLED: Final = 16
"""Elements of a sample."""

Later = Callable[[], torch.Tensor]
"""Returns a CPU copy, once it has arrived."""


def copied(tensor: torch.Tensor) -> Later:
    """Copy a tensor as it is now, without waiting for a CUDA device."""
    now = local_of(tensor).detach()
    if not now.is_cuda:
        clone = now.clone()
        return lambda: clone
    host = torch.empty(now.shape, dtype=now.dtype, pin_memory=True)
    host.copy_(now, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def arrived() -> torch.Tensor:
        event.synchronize()
        return host

    return arrived


def frozen_state(
    optimizer: torch.optim.Optimizer,
    trained: Collection[nn.Parameter],
    parameters: Callable[[], Mapping[str, nn.Parameter]],
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of parameters whose gradients are not reduced, named by `name_frozen`.

    `trained` has the other parameters, and `parameters` returns all of the model, by name.
    """
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    untrained = [(index, p) for index, p in enumerate(flat) if p not in trained and p in optimizer.state]
    if not untrained:
        return {}
    names = {parameter: name for name, parameter in parameters().items()}
    return {
        name: tensor
        for index, parameter in untrained
        for name, tensor in name_frozen(
            index, _local_state(optimizer.state[parameter]), names.get(parameter, "")
        )
    }


def _local_state(entries: Mapping[str, object]) -> dict[str, object]:
    return {
        name: local_of(value) if isinstance(value, torch.Tensor) else value for name, value in entries.items()
    }


Find = Callable[[], Mapping[str, torch.Tensor]]


def fitting(find: Find, most: int = ALL_BYTES) -> Find:
    """Return `find`, without the largest tensors if all exceed `most` bytes, and log what is left out."""
    sizes = {name: local_of(tensor).nbytes for name, tensor in find().items()}
    without: set[str] = set()
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if sum(sizes.values()) - sum(sizes[dropped] for dropped in without) <= most:
            break
        without.add(name)
    if not without:
        return find
    _log.warning(
        "buffers and frozen parameters exceed %d MiB: shadow nodes don't keep these, so the script has to "
        "restore them itself: %s",
        most >> 20,
        ", ".join(sorted(without)),
    )
    return lambda: {name: tensor for name, tensor in find().items() if name not in without}


class Buffers:
    """Finds the buffers that have changed since they were last sent."""

    def __init__(
        self,
        find: Find,
        *,
        everything: bool,
        changed_before: Iterable[str] = (),
    ) -> None:
        """Look at the buffers for the first time.

        Args:
            find: Returns the buffers by name.
            everything: Send all buffers once, a few MiB per record, and then those that change. Otherwise the
                buffers differ between ranks, and each record has the small ones and all that ever changed.
            changed_before: Names of buffers that changed before a restart.
        """
        self._find = fitting(find)
        self._everything = everything
        self._snapshots = {name: _Snapshot(name, tensor) for name, tensor in self._find().items()}
        self._ever = set(changed_before) | {
            name for name, snapshot in self._snapshots.items() if snapshot.small
        }
        self._unsent = list(self._snapshots) if everything else []
        self._round = 0
        self._uncounted: set[str] = set()

    @property
    def names(self) -> set[str]:
        """Names of all buffers kept, as of the last record."""
        return set(self._snapshots)

    def again(self) -> None:
        """Send again those that are sent once: a node joined without them. Callable from any thread."""
        if self._everything:
            self._unsent = list(self._snapshots)

    def all(self, most: int = FIRST_BYTES) -> Iterator[dict[str, Later]]:
        """Yield copies of all buffers in lots of at least `most` bytes, except for the last.

        `take` returns them nevertheless, because nodes that join before the first record need them.
        """
        lot: dict[str, Later] = {}
        nbytes = 0
        for name, tensor in self._find().items():
            lot[name] = copied(tensor)
            nbytes += local_of(tensor).nbytes
            if nbytes >= most:
                yield lot
                lot, nbytes = {}, 0
        if lot:
            yield lot

    def take(self, *, again: bool = False) -> dict[str, Later]:
        """Return copies of the buffers that the record must contain.

        `again`: only of those that have changed since the last look, and of all small ones on a CUDA device.
        """
        now = self._find()
        names = self._look(now)
        self._ever |= names
        if not again:
            names = names | self._first(now) if self._everything else self._ever & now.keys()
        return {name: copied(now[name]) for name in sorted(names)}

    def _look(self, now: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of buffers that have changed since the last look."""
        for name_gone in self._snapshots.keys() - now.keys():
            del self._snapshots[name_gone]
        changed_names = set()
        for name, tensor in now.items():
            snapshot = self._snapshots.get(name)
            if snapshot is None or snapshot.differs(tensor):
                self._snapshots[name] = _Snapshot(name, tensor, sampled=self._round < ROUNDS)
                changed_names.add(name)
        self._look_at_samples(now)
        return changed_names | (self._uncounted & now.keys())

    def _look_at_samples(self, now: Mapping[str, torch.Tensor]) -> None:
        """Find tensors that the script changes through `.data`, which no version counts: always send these.

        A few are looked at in turn. On a CUDA device all are, but only at first, because that waits for it.
        """
        names = [
            name
            for name, snapshot in self._snapshots.items()
            if not snapshot.small and name not in self._uncounted
        ]
        if not names:
            return
        first = self._round * LOOKED_AT
        self._round += 1
        sampled = [names[(first + i) % len(names)] for i in range(min(LOOKED_AT, len(names)))]
        if any(now[name].is_cuda for name in names):
            sampled = names if self._round <= ROUNDS else []
        if any(self._snapshots[name].sample_differs(now[name]) for name in sampled):
            self._uncounted |= {name for name in names if self._snapshots[name].sample_differs(now[name])}

    def _first(self, now: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of some buffers that were never sent."""
        names: set[str] = set()
        room = FIRST_BYTES
        unsent = self._unsent
        while unsent and room > 0:
            name = unsent.pop()
            if name in now:
                room -= local_of(now[name]).nbytes
                names.add(name)
        return names


class _Snapshot:
    """A buffer's earlier state: its bytes if it is `small` and on the CPU, else only its version."""

    def __init__(self, name: str, tensor: torch.Tensor, *, sampled: bool = True) -> None:
        """Look at it. `sampled`: on a CUDA device, too, at a sample, which waits for the device."""
        self._place = _place(tensor)
        has_version = isinstance(tensor, nn.Parameter) or (is_frozen_state(name) and tensor.dim() > 0)
        # Extra state is packed again at each look, so its place shows nothing.
        self.small = not has_version and (local_of(tensor).nbytes <= EXACT_BYTES or is_extra_state(name))
        self._sample = None if self.small or (tensor.is_cuda and not sampled) else _sample(tensor)
        # Comparing would wait for a CUDA device, so a small buffer there is always sent.
        self._copy = local_of(tensor).detach().clone() if self.small and not tensor.is_cuda else None

    def sample_differs(self, tensor: torch.Tensor) -> bool:
        """Return whether a few elements are others than at the earlier state."""
        return self._sample is not None and self._sample != _sample(tensor)

    def differs(self, tensor: torch.Tensor) -> bool:
        if self._copy is None and self.small:
            return True
        if self._copy is None:
            return self._place != _place(tensor)
        local = local_of(tensor).detach()
        if (self._copy.shape, self._copy.dtype) != (local.shape, local.dtype):
            return True
        # `torch.equal` takes 0.0 and -0.0 for equal, and two NaNs for different.
        return bytes_of(self._copy.contiguous()) != bytes_of(local.contiguous())


def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bits of some elements, evenly spread."""
    flat = local_of(tensor).detach().reshape(-1)
    return bytes(bytes_of(flat[:: max(flat.numel() // SAMPLED, 1)].cpu().contiguous()))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's memory and version. Changes of a DTensor count at itself, not at its local part."""
    return local_of(tensor).data_ptr(), tensor._version, tensor.shape
