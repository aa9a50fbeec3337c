"""Ranks with the same state read a part of it each, and send each other what they have read.

Shadow nodes then send each byte once, however many ranks there are; the ranks' own network carries the rest.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from checkmate.nodes.reader import Asked, States
from checkmate.state import DTYPES, bytes_of, dtype_name
from checkmate.training.model.trained import TrainedModel
from checkmate.training.start import exchange
from checkmate.training.start.exchange import ExchangeError, Named
from checkmate.training.start.membership import Membership
from checkmate.wire.layout import Layout

PIECE_BYTES: Final = 2 << 20
"""What each rank sends at once."""
PIECES_BYTES: Final = 256 << 20
"""What all ranks together send at once, at most: of a GPU's memory, if they send by way of it."""


@dataclass(frozen=True)
class Readers:
    """The ranks that need the same state, and this rank's place among them."""

    ranks: Sequence[int]
    """Global ranks, in the order of their parts."""
    own: int
    """This rank's index in `ranks`."""
    group: dist.ProcessGroup
    """PyTorch's group of these ranks."""
    device: torch.device
    """Where the group takes tensors."""


def readers_of(place: Membership, model: TrainedModel) -> Readers | None:
    """Return the ranks that need the same state as this one; `None` if PyTorch has no group of them."""
    if model.process_group is None:
        return None
    group = model.process_group
    ranks = dist.get_process_group_ranks(group)
    first = next(iter(model.trained().values()))
    return Readers(ranks, ranks.index(place.rank), group, exchange.device(group, first.device))


def divide(asked: Sequence[Asked], layouts: Mapping[int, Layout], readers: int) -> list[dict[int, list[int]]]:
    """Return which parameters each reader reads, by index in `asked`, so that all read as much. Pure."""
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
    return parts


def part_of_all(
    wanted: Mapping[Asked, Sequence[int]], layouts: Mapping[int, Layout], readers: Readers
) -> dict[Asked, Sequence[int]]:
    """Return the requests for this rank's part of the shards: of some only the header. Pure."""
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


def prepare(own: States, tables: Sequence[Any], readers: Readers | None, named: Named) -> Parts | None:
    """Return the parts of all readers, with memory for the others' and for the exchange.

    `None` without readers.

    Args:
        own: What this rank has read.
        tables: By rank, the `table` of what it has read.
        readers: The ranks that need the same.
        named: Returns a rank's name in errors.

    Raises:
        ExchangeError: A reader does not say what it has read, or two have read the same.
    """
    if readers is None:
        return None
    found: States = {}
    parts = []
    for rank in readers.ranks:
        entries = _entries(tables[rank], named(rank))
        if twice := found.keys() & {entry.number for entry in entries}:
            raise ExchangeError(f"{named(rank)} has read parameter {min(twice)}, as another rank has")
        states = own if rank == readers.ranks[readers.own] else _made(entries)
        found |= states
        parts.append(_Bytes(states, entries))
    size = max(min(PIECE_BYTES, PIECES_BYTES // len(parts)), 1)
    given = torch.zeros(size, dtype=torch.uint8)
    taken = torch.empty(len(parts), size, dtype=torch.uint8, device=readers.device)
    return Parts(found, parts, readers, given, taken)


def share(own: States, parts: Parts | None, named: Named) -> States:
    """Return what all readers have read. All ranks of the job call it.

    Args:
        own: What this rank has read: all that it needs if there are no `parts`.
        parts: What `prepare` has returned.
        named: Returns a rank's name in errors.

    Raises:
        ExchangeError: On all ranks, if one has received something else than another one has sent.
    """
    digest = None
    if parts is not None:
        parts.exchange()
        digest = parts.own.digest()
    told = exchange.gather(digest, named=named)
    trouble = "" if parts is None else parts.trouble(told, named)
    if found := next(filter(None, exchange.gather(trouble, named=named)), None):
        raise ExchangeError(str(found))
    return own if parts is None else parts.states


def table(own: States) -> list[_Entry]:
    """Return what a rank has read, without the contents of tensors, as JSON can express it."""
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


def _made(entries: Sequence[_Entry]) -> States:
    """Return a rank's states with tensors whose values are still to come."""
    values: dict[int, dict[str, object]] = {}
    for entry in entries:
        value: object = float.fromhex(entry.value) if isinstance(entry.value, str) else entry.value
        if entry.dtype:
            value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        values.setdefault(entry.number, {})[entry.name] = value
    made: States = {}
    for number, known in values.items():
        tensor = known.pop("")
        assert isinstance(tensor, torch.Tensor)
        made[number] = (tensor, known)
    return made


class _Bytes:
    """The bytes of a rank's tensors, in the order of its table."""

    def __init__(self, states: States, entries: Sequence[_Entry]) -> None:
        self._tensors: list[torch.Tensor] = []
        self._begins: list[int] = []
        self.size = 0
        for entry in entries:
            tensor, values = states[entry.number]
            value = values[entry.name] if entry.name else tensor
            if isinstance(value, torch.Tensor) and value.nbytes:
                self._tensors.append(value.contiguous().reshape(-1).view(torch.uint8))
                self._begins.append(self.size)
                self.size += value.nbytes

    def between(self, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield views of these bytes, each with its distance from `begin`."""
        for at in range(max(bisect_right(self._begins, begin) - 1, 0), len(self._begins)):
            start = self._begins[at]
            if start >= end:
                return
            view = self._tensors[at][max(begin - start, 0) : end - start]
            yield max(start - begin, 0), view

    def give(self, begin: int, piece: torch.Tensor) -> None:
        """Copy bytes from `begin` on into a piece."""
        for at, view in self.between(begin, begin + len(piece)):
            piece[at : at + len(view)] = view

    def digest(self) -> str:
        """Return XXH3 of all bytes: it finds accidents."""
        hashed = xxhash.xxh3_128()
        for tensor in self._tensors:
            hashed.update(bytes_of(tensor))
        return hashed.hexdigest()

    def take(self, begin: int, piece: torch.Tensor) -> None:
        """Copy a piece into these bytes from `begin` on."""
        for at, view in self.between(begin, begin + len(piece)):
            view.copy_(piece[at : at + len(view)])


@dataclass(frozen=True)
class Parts:
    """What each of several readers has read, or will have from another one."""

    states: States
    """All of it. Parts of other ranks have their values after `exchange`."""
    parts: Sequence[_Bytes]
    """By index of the reader."""
    readers: Readers
    given: torch.Tensor
    """Memory for a piece of this rank's, on the CPU."""
    taken: torch.Tensor
    """Memory for a piece of each reader's, by index, where the group takes tensors."""

    @property
    def own(self) -> _Bytes:
        """The part that this rank has read."""
        return self.parts[self.readers.own]

    def trouble(self, told: Sequence[Any], named: Named) -> str:
        """Return which part is not what its rank has read, or "". `told`: by rank, the digest of its part."""
        own = named(self.readers.ranks[self.readers.own])
        for rank, part in zip(self.readers.ranks, self.parts, strict=True):
            if part is not self.own and part.digest() != told[rank]:
                return (
                    f"{own} has received other state than {named(rank)} has read from the shadow nodes: the "
                    "network or the memory of one of them is at fault"
                )
        return ""

    def exchange(self) -> None:
        """Send this rank's bytes to all readers, and receive theirs, piece by piece.

        All send at once, which uses all of their links, as long as most of them have something left to send:
        a large parameter may be most of what one of them has read.
        """
        parts, ranks, own = self.parts, self.readers.ranks, self.readers.own
        longest = max(part.size for part in parts)
        for begin in range(0, longest, len(self.given)):
            having = [at for at, part in enumerate(parts) if part.size > begin]
            taken = self.taken[:, : longest - begin]
            self.own.give(begin, self.given)
            mine = self.given[: longest - begin].to(self.readers.device)
            if 2 * len(having) > len(parts):
                dist.all_gather(list(taken), mine, group=self.readers.group)
            else:
                for at in having:
                    sent = mine if at == own else taken[at]
                    dist.broadcast(sent, src=ranks[at], group=self.readers.group)
            for at in having:
                if at != own:
                    parts[at].take(begin, taken[at].cpu())
