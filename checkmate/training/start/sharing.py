"""Ranks with the same state read a part of it each, and send each other what they have read.

Shadow nodes then send each byte once, however many ranks there are; the ranks' own network carries the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from checkmate.nodes.reader import Asked, States
from checkmate.state import DTYPES, bytes_of, dtype_name
from checkmate.training.model.trained import TrainedModel
from checkmate.training.start import exchange
from checkmate.training.start.exchange import ExchangeError, Named
from checkmate.training.start.membership import Membership
from checkmate.wire.layout import Layout

CHUNK_BYTES: Final = 64 << 20
"""What one broadcast carries; on a GPU, it takes that much of its memory."""
_ALIGNED: Final = 16
"""Bytes; tensors begin at multiples, so that their bytes can be viewed as any type."""


@dataclass(frozen=True)
class Readers:
    """The ranks that need the same state, and this rank's place among them."""

    ranks: Sequence[int]
    """Global ranks, in the order of their parts."""
    own: int
    """This rank's index in `ranks`."""
    group: dist.ProcessGroup
    """PyTorch's group of these ranks."""


def readers_of(place: Membership, model: TrainedModel) -> Readers | None:
    """Return the ranks that need the same state as this one; `None` if PyTorch has no group of them."""
    if model.process_group is None:
        return None
    ranks = dist.get_process_group_ranks(model.process_group)
    return Readers(ranks, ranks.index(place.rank), model.process_group)


def divide(asked: Sequence[Asked], layouts: Mapping[int, Layout], readers: int) -> list[dict[int, list[int]]]:
    """Return which parameters each reader reads, by index in `asked`, so that all read about as much. Pure.

    Each reader reads something of each shard that has parameters, because the step record comes with it.
    """
    sizes = [
        (prod(layouts[one.group].parameters[number].shape), at, number)
        for at, one in enumerate(asked)
        for number in layouts[one.group].of_shard(one.shard)
    ]
    parts = [dict[int, list[int]]() for _ in range(readers)]
    loads = [(0, reader) for reader in range(readers)]  # a heap: the largest goes to who has least
    for size, at, number in sorted(sizes, key=lambda one: (-one[0], one[1:])):
        load, least = loads[0]
        parts[least].setdefault(at, []).append(number)
        heapq.heapreplace(loads, (load + size, least))
    smallest = {at: number for _, at, number in sorted(sizes, reverse=True)}
    for part in parts:
        for at, number in smallest.items():
            part.setdefault(at, [number])
    return parts


def part_of_all(
    wanted: Mapping[Asked, Sequence[int]], layouts: Mapping[int, Layout], readers: Readers
) -> dict[Asked, Sequence[int]]:
    """Return the requests for this rank's part of the shards. Pure."""
    order = sorted(wanted, key=lambda one: (one.group, one.shard))
    part = divide(order, layouts, len(readers.ranks))[readers.own]
    return {
        replace(one, parameters=tuple(sorted(part.get(at, ())))): wanted[one] for at, one in enumerate(order)
    }


class _Entry(NamedTuple):
    """A parameter's own tensor (`name` is "") or an entry of its optimizer state, in a rank's table."""

    number: int
    name: str
    dtype: str | None
    """`None` if it is not a tensor."""
    shape: list[int]
    value: bool | int | str | None = None
    """If it is not a tensor; a float as hexadecimal digits, because JSON has neither NaN nor infinity."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype else 0

    @property
    def room(self) -> int:
        return -(-self.nbytes // _ALIGNED) * _ALIGNED


def share(own: States, readers: Readers | None, named: Named) -> States:
    """Return what all readers have read. All ranks of the job call it, each with what it has read.

    Args:
        own: What this rank has read.
        readers: The ranks that need the same; `None` if this rank has read everything that it needs.
        named: Returns a rank's name in errors.

    Raises:
        ExchangeError: A reader does not say what it has read.
    """
    tables = exchange.gather(_table(own) if readers else None, named=named)
    if readers is None:
        return own
    entries = {rank: _entries(tables[rank], named(rank)) for rank in readers.ranks}
    found = dict(own)
    for rank in readers.ranks:
        flat = torch.empty(sum(entry.room for entry in entries[rank]), dtype=torch.uint8)
        mine = rank == readers.ranks[readers.own]
        if mine:
            _pack(own, entries[rank], flat)
        _broadcast(flat, rank, readers.group)
        if not mine:
            found |= _unpacked(entries[rank], flat)
    return found


def _table(own: States) -> list[_Entry]:
    table = []
    for number, (tensor, values) in own.items():
        for name, value in {"": tensor, **values}.items():
            if isinstance(value, torch.Tensor):
                table.append(_Entry(number, name, dtype_name(value.dtype), list(value.shape)))
            elif isinstance(value, float):
                table.append(_Entry(number, name, None, [], value.hex()))
            else:
                assert value is None or isinstance(value, int), value
                table.append(_Entry(number, name, None, [], value))
    return table


def _entries(table: Any, name: str) -> list[_Entry]:
    """Return a rank's table. Raise `ExchangeError` if it is not one."""
    found = table if isinstance(table, list) else []
    entries = [_Entry(*one) for one in found if isinstance(one, list) and len(one) == len(_Entry._fields)]
    numbers = {entry.number for entry in entries}
    whole = found == table and len(entries) == len(found)
    whole &= numbers == {entry.number for entry in entries if entry.dtype and not entry.name}
    if not whole or any(entry.dtype not in (None, *DTYPES) for entry in entries):
        raise ExchangeError(f"{name} does not say what it has read from the shadow nodes")
    return entries


def _pack(own: States, entries: Sequence[_Entry], flat: torch.Tensor) -> None:
    at = 0
    for entry in entries:
        tensor, values = own[entry.number]
        value = values[entry.name] if entry.name else tensor
        if isinstance(value, torch.Tensor) and entry.nbytes:
            flat[at : at + entry.nbytes] = torch.frombuffer(bytes_of(value.contiguous()), dtype=torch.uint8)
        at += entry.room


def _unpacked(entries: Sequence[_Entry], flat: torch.Tensor) -> States:
    """Return copies, because a view would keep the memory of all tensors that came with it."""
    values: dict[int, dict[str, object]] = {}
    at = 0
    for entry in entries:
        value: object = float.fromhex(entry.value) if isinstance(entry.value, str) else entry.value
        if entry.dtype:
            value = flat[at : at + entry.nbytes].clone().view(DTYPES[entry.dtype]).reshape(entry.shape)
        values.setdefault(entry.number, {})[entry.name] = value
        at += entry.room
    found: States = {}
    for number, known in values.items():
        tensor = known.pop("")
        assert isinstance(tensor, torch.Tensor)
        found[number] = (tensor, known)
    return found


def _broadcast(flat: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Send or receive bytes in place, in chunks; by way of a GPU if the group takes only its tensors."""
    device = exchange.device(group)
    for start in range(0, len(flat), CHUNK_BYTES):
        chunk = flat[start : start + CHUNK_BYTES]
        moved = chunk.to(device)
        dist.broadcast(moved, src=source, group=group)
        if moved is not chunk:
            chunk.copy_(moved)
