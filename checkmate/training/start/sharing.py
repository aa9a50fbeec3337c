"""Ranks with the same state read a part of it each, and send each other what they have read.

Shadow nodes then send each byte once, however many ranks there are; the ranks' own network carries the rest.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from checkmate.nodes.reader import ShardRequest, States
from checkmate.state import DTYPES, bytes_of, dtype_name
from checkmate.training.model.trained import TrainedModel
from checkmate.training.start import exchange
from checkmate.training.start.exchange import ExchangeError, NameOf
from checkmate.training.start.places import Place
from checkmate.wire.layout import Layout

IN_FLIGHT: Final = 8
"""Pieces of all ranks that are under way at once. Each needs `PIECE_BYTES` of a GPU, if one is on the way."""

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class Readers:
    """The ranks that need the same state, and this rank's place among them."""

    ranks: Sequence[int]
    """Global ranks, in the order of their parts."""
    index: int
    """This rank's index in `ranks`."""
    group: dist.ProcessGroup
    """PyTorch's group of these ranks."""
    device: torch.device
    """The device on which the group takes tensors."""
    survivors: Sequence[int] = ()
    """The indices of those that have the state already and share it out; if there are none, all read it."""


def readers_of(place: Place, model: TrainedModel, survivors: Collection[int] = ()) -> Readers | None:
    """Return the ranks that need the same state as this one; `None` if PyTorch has no group of them.

    `survivors`: the ranks that have the state already, and share it out instead of reading it from nodes.
    """
    if model.process_group is None:
        return None
    group = model.process_group
    ranks = dist.get_process_group_ranks(group)
    first = next(iter(model.trained().values()))
    have_it = [index for index, rank in enumerate(ranks) if rank in survivors]
    return Readers(ranks, ranks.index(place.rank), group, exchange.device(group, first.device), have_it)


def divide(
    requests: Sequence[ShardRequest], layouts: Mapping[int, Layout], readers: int
) -> list[dict[int, list[int]]]:
    """Return which parameters each reader reads, by index in `requests`, so that all read as much. Pure."""
    sizes = [
        (prod(layouts[request.group].parameters[number].shape), at, number)
        for at, request in enumerate(requests)
        for number in layouts[request.group].of_shard(request.shard)
    ]
    parts = [dict[int, list[int]]() for _ in range(readers)]
    loads = [(0, reader) for reader in range(readers)]  # a heap: the largest goes to who has least
    for size, at, number in sorted(sizes, key=lambda request: (-request[0], request[1:])):
        load, least = loads[0]
        parts[least].setdefault(at, []).append(number)
        heapq.heapreplace(loads, (load + size, least))
    return parts


def part_of_all(
    requests: Mapping[ShardRequest, Sequence[int]], layouts: Mapping[int, Layout], readers: Readers
) -> dict[ShardRequest, Sequence[int]]:
    """Return the requests for this rank's part of the shards: of some only the header. Pure."""
    order = sorted(requests, key=lambda request: (request.group, request.shard))
    sources = readers.survivors or range(len(readers.ranks))
    part: dict[int, list[int]] = {}
    if readers.index in sources:
        part = divide(order, layouts, len(sources))[sources.index(readers.index)]
    return {
        replace(request, parameters=tuple(sorted(part.get(at, ())))): requests[request]
        for at, request in enumerate(order)
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


def prepare(
    own_states: States, tables: Sequence[Any], readers: Readers | None, name_of: NameOf
) -> Parts | None:
    """Return the parts of all readers, with memory for the others' and for the exchange.

    `None` without readers.

    Args:
        own_states: What this rank has read.
        tables: By rank, the `table` of what it has read.
        readers: The ranks that need the same.
        name_of: Returns a rank's name in errors.

    Raises:
        ExchangeError: A reader does not say what it has read, or two have read the same.
    """
    if readers is None:
        return None
    all_states: States = {}
    parts = []
    for rank in readers.ranks:
        entries = _entries(tables[rank], name_of(rank))
        if twice := all_states.keys() & {entry.number for entry in entries}:
            raise ExchangeError(f"{name_of(rank)} has read parameter {min(twice)}, as another rank has")
        states = own_states if rank == readers.ranks[readers.index] else _blank_states(entries)
        all_states |= states
        parts.append(TensorBytes(_tensors(states, entries)))
    device = readers.device
    slots = torch.empty(IN_FLIGHT, 0 if device == _CPU else PIECE_BYTES, dtype=torch.uint8, device=device)
    return Parts(all_states, parts, readers, slots)


def share(own_states: States, parts: Parts | None, name_of: NameOf) -> States:
    """Return what all readers have read. All ranks of the job call it.

    Args:
        own_states: What this rank has read: all that it needs if there are no `parts`.
        parts: What `prepare` has returned.
        name_of: Returns a rank's name in errors.

    Raises:
        ExchangeError: On all ranks, if one has received something else than another one has sent.
    """
    digest = None
    if parts is not None:
        parts.exchange()
        digest = parts.own_part.digest()
    digests = exchange.gather(digest, name_of=name_of)
    trouble = "" if parts is None else parts.trouble(digests, name_of)
    if failure := next(filter(None, exchange.gather(trouble, name_of=name_of)), None):
        raise ExchangeError(str(failure))
    return own_states if parts is None else parts.states


def table(own_states: States) -> list[_Entry]:
    """Return what a rank has read, without the contents of tensors, as JSON can express it."""
    table = []
    for number, (tensor, values) in own_states.items():
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
    rows = table if isinstance(table, list) else []
    entries = [_Entry(*row) for row in rows if isinstance(row, list) and len(row) == len(_Entry._fields)]
    numbers = {entry.number for entry in entries}
    whole = rows == table and len(entries) == len(rows)
    whole &= numbers == {entry.number for entry in entries if entry.dtype and not entry.name}
    if not whole or any(entry.dtype not in (None, *DTYPES) for entry in entries):
        raise ExchangeError(f"{name} does not say what it has read from the shadow nodes")
    return entries


def _blank_states(entries: Sequence[_Entry]) -> States:
    """Return a rank's states with tensors whose values are still to come."""
    values: dict[int, dict[str, object]] = {}
    for entry in entries:
        value: object = float.fromhex(entry.value) if isinstance(entry.value, str) else entry.value
        if entry.dtype:
            value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        values.setdefault(entry.number, {})[entry.name] = value
    blank: States = {}
    for number, entry_values in values.items():
        tensor = entry_values.pop("")
        assert isinstance(tensor, torch.Tensor)
        blank[number] = (tensor, entry_values)
    return blank


def _tensors(states: States, entries: Sequence[_Entry]) -> Iterator[torch.Tensor]:
    """Yield a rank's tensors, in the order of its table."""
    for entry in entries:
        tensor, values = states[entry.number]
        value = values[entry.name] if entry.name else tensor
        if isinstance(value, torch.Tensor):
            yield value


@dataclass(frozen=True)
class Parts:
    """The parts that several readers have read, or will have from one another."""

    states: States
    """All of it. Parts of other ranks have their values after `exchange`."""
    parts: Sequence[TensorBytes]
    """By index of the reader."""
    readers: Readers
    slots: torch.Tensor
    """Memory for pieces that are under way, where the group takes tensors; none if that is the CPU."""

    @property
    def own_part(self) -> TensorBytes:
        """The part that this rank has read."""
        return self.parts[self.readers.index]

    def trouble(self, digests: Sequence[Any], name_of: NameOf) -> str:
        """Return which part is not what its rank has read, or "". `digests`: of the parts, by rank."""
        name = name_of(self.readers.ranks[self.readers.index])
        for rank, part in zip(self.readers.ranks, self.parts, strict=True):
            if part is not self.own_part and part.digest() != digests[rank]:
                return (
                    f"{name} has received other state than {name_of(rank)} has read from the shadow nodes: "
                    "the network or the memory of one of them is at fault"
                )
        return ""

    def exchange(self) -> None:
        """Send this rank's bytes to all readers, and receive theirs.

        The readers take turns, with several pieces under way, which uses all of their links.
        """
        under_way: deque[tuple[dist.Work, torch.Tensor, int, SentPiece]] = deque()
        for number, (at, piece) in enumerate(self._turns()):
            if len(under_way) == IN_FLIGHT:
                self._finish(*under_way.popleft())
            under_way.append((*self._begin(at, piece, self.slots[number % IN_FLIGHT]), at, piece))
        while under_way:
            self._finish(*under_way.popleft())

    def _turns(self) -> Iterator[tuple[int, SentPiece]]:
        """Yield the pieces of all readers in turns, each with the reader's index."""
        for turn in zip_longest(*(part.pieces for part in self.parts)):
            yield from ((at, piece) for at, piece in enumerate(turn) if piece is not None)

    def _begin(self, at: int, piece: SentPiece, slot: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        """Send or receive a piece of reader `at`; return the work, and the tensor that is on the way."""
        buffer = piece.bytes if self.readers.device == _CPU else slot[: len(piece.bytes)]
        if at == self.readers.index:
            piece.give()
            if buffer is not piece.bytes:
                buffer.copy_(piece.bytes)
        source, group = self.readers.ranks[at], self.readers.group
        work: dist.Work | None = dist.broadcast(buffer, src=source, group=group, async_op=True)
        assert work is not None  # else this rank would not be in the group
        return work, buffer

    def _finish(self, work: dist.Work, buffer: torch.Tensor, at: int, piece: SentPiece) -> None:
        work.wait()
        if at != self.readers.index:
            if buffer is not piece.bytes:
                piece.bytes.copy_(buffer)
            piece.take()


PIECE_BYTES: Final = 4 << 20
"""The most that a rank sends at once."""
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
        self._flats = [
            tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.nbytes
        ]
        self.pieces = [SentPiece(views) for views in _piece_views(self._flats)]

    def digest(self) -> str:
        """Return XXH3 of all bytes: it finds accidents."""
        hashed = xxhash.xxh3_128()
        for flat in self._flats:
            hashed.update(bytes_of(flat))
        return hashed.hexdigest()


def _piece_views(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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
