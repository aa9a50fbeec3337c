"""Copies of what a trainer has beside trained parameters, for the step record: buffers, as they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.state import is_frozen_state, name_frozen

_log: Final = logging.getLogger("checkmate")

EXACT_BYTES: Final = 1 << 20
"""Buffers up to this size are compared byte by byte: BatchNorm changes its own without counting a version."""
FIRST_BYTES: Final = 4 << 20
"""So much of what has never been sent goes with one record."""
ALL_BYTES: Final = 200 << 20
"""Buffers and frozen parameters of more than this don't fit into a record: the largest are left out."""

Later = Callable[[], torch.Tensor]
"""A CPU copy, once it has arrived."""


def copied(tensor: torch.Tensor) -> Later:
    """A copy of a tensor as it is now; from a CUDA device without waiting for it."""
    now = tensor.detach()
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


def kept_beside(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """What a model has beside trained parameters: buffers, and parameters that need no gradient."""
    ignored = ddp.parameters_to_ignore
    frozen = {name: p for name, p in ddp.module.named_parameters() if not p.requires_grad}
    every: dict[str, torch.Tensor] = {**frozen, **dict(ddp.module.named_buffers())}
    return {name: tensor for name, tensor in every.items() if name not in ignored}


def frozen_state(
    optimizer: torch.optim.Optimizer, trained: Collection[nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The optimizer's state of parameters that training doesn't reduce, by names of its own."""
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        name: tensor
        for index, parameter in enumerate(flat)
        if parameter not in trained and parameter in optimizer.state
        for name, tensor in name_frozen(index, optimizer.state[parameter])
    }


def state_names(ddp: DistributedDataParallel) -> dict[str, str]:
    """Each key of the model's `state_dict()`, and the name of its tensor among parameters and buffers."""
    tensors = [*ddp.module.named_parameters(), *ddp.module.named_buffers()]
    names = {id(tensor): name for name, tensor in tensors}
    stored = ddp.module.state_dict(keep_vars=True)
    return {key: names[id(tensor)] for key, tensor in stored.items() if id(tensor) in names}


def synchronised(ddp: DistributedDataParallel) -> bool:
    """Whether DDP gives all ranks the first one's buffers."""
    return bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)))


Find = Callable[[], Mapping[str, torch.Tensor]]


def fitting(find: Find, most: int = ALL_BYTES) -> Find:
    """`find` without the largest, where all would have more than `most` bytes; those are named in the log."""
    sizes = {name: tensor.nbytes for name, tensor in find().items()}
    without: set[str] = set()
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if sum(sizes.values()) - sum(sizes[one] for one in without) <= most:
            break
        without.add(name)
    if not without:
        return find
    _log.warning(
        "buffers and frozen parameters have more than %d MiB: shadow nodes don't keep these, the script has "
        "to make them itself: %s",
        most >> 20,
        ", ".join(sorted(without)),
    )
    return lambda: {name: tensor for name, tensor in find().items() if name not in without}


class Buffers:
    """Which buffers have changed since they were last sent.

    `everything`: begin with those that never were, a few MiB at a time. Else this rank's buffers are its own,
    and each record has the small ones, and all that ever changed, `changed` before now among them.
    """

    def __init__(
        self,
        find: Find,
        *,
        everything: bool,
        changed: Sequence[str] = (),
    ) -> None:
        self._find = fitting(find)
        self._everything = everything
        self._seen = {name: _seen(name, tensor) for name, tensor in self._find().items()}
        self._ever = set(changed) | {name for name, seen in self._seen.items() if seen.small}
        self._unsent = list(self._seen) if everything else []

    @property
    def names(self) -> set[str]:
        """All that are kept: what the model had when the last record was made."""
        return set(self._seen)

    def again(self) -> None:
        """A node has come without them: those that are sent once are sent once more. From any thread."""
        if self._everything:
            self._unsent = list(self._seen)

    def all(self, most: int = FIRST_BYTES) -> Iterator[dict[str, Later]]:
        """Copies of all as they are now, a few at a time: each lot but the last has `most` bytes or more.

        `take` gives them all the same: who comes, or is started again, before the first record needs them.
        """
        lot: dict[str, Later] = {}
        nbytes = 0
        for name, tensor in self._find().items():
            lot[name] = copied(tensor)
            nbytes += tensor.nbytes
            if nbytes >= most:
                yield lot
                lot, nbytes = {}, 0
        if lot:
            yield lot

    def take(self) -> dict[str, Later]:
        """Copies of those that the record has to say."""
        now = self._find()
        changed = self._look(now)
        if self._everything:
            changed |= self._first(now)
        else:
            self._ever |= changed
            changed = self._ever & now.keys()
        return {name: copied(now[name]) for name in sorted(changed)}

    def changes(self) -> dict[str, Later]:
        """Copies of those that have changed since the last look, and of all small ones on a CUDA device."""
        now = self._find()
        changed = self._look(now)
        self._ever |= changed
        return {name: copied(now[name]) for name in sorted(changed)}

    def _look(self, now: Mapping[str, torch.Tensor]) -> set[str]:
        """The names of those that have changed since the last look."""
        for gone in self._seen.keys() - now.keys():
            del self._seen[gone]
        changed = set()
        for name, tensor in now.items():
            seen = self._seen.get(name)
            if seen is None or seen.differs(tensor):
                self._seen[name] = _seen(name, tensor)
                changed.add(name)
        return changed

    def _first(self, now: Mapping[str, torch.Tensor]) -> set[str]:
        """Some of those that were never sent."""
        chosen: set[str] = set()
        left = FIRST_BYTES
        unsent = self._unsent
        while unsent and left > 0:
            name = unsent.pop()
            if name in now:
                left -= now[name].nbytes
                chosen.add(name)
        return chosen


def _seen(name: str, tensor: torch.Tensor) -> _Seen:
    counted = isinstance(tensor, nn.Parameter) or (is_frozen_state(name) and tensor.dim() > 0)
    return _Seen(tensor, small=not counted and tensor.nbytes <= EXACT_BYTES)


class _Seen:
    """A buffer as it was: its bytes if it is `small` and on the CPU, else only its version."""

    def __init__(self, tensor: torch.Tensor, *, small: bool) -> None:
        self._place = (tensor.data_ptr(), tensor._version, tensor.shape)
        self.small = small
        # To compare on a CUDA device would wait for it: there a small one is always sent.
        self._copy = tensor.detach().clone() if self.small and not tensor.is_cuda else None

    def differs(self, tensor: torch.Tensor) -> bool:
        if self._copy is None and self.small:
            return True
        if self._copy is None:
            return self._place != (tensor.data_ptr(), tensor._version, tensor.shape)
        return self._copy.shape != tensor.shape or not torch.equal(self._copy, tensor)
