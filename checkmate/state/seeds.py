"""Exact conversion of parameters and optimizer state to messages, and back.

Pure. A parameter is sent in pieces of at most 1 MiB: first its own data, then each entry of its optimizer
state. The stream ends with a checksum, and its contents are valid only once that has been verified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
import xxhash

from checkmate.base.wording import counted
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state.tensors import DTYPES, StateError, bytes_of, dtype_name
from checkmate.wire.parameter import Parameter

PIECE_BYTES: Final = 1 << 20
"""Maximum tensor data of a piece."""
ENTRIES_MAX: Final = 16
NAME_MAX: Final = 64
"""Limits of a parameter's optimizer state; torch's optimizers have at most four entries."""


def to_number(name: str, value: object) -> pb.Number:
    """Return an entry of the optimizer state that is not a tensor. Raise `StateError` if not a number."""
    match value:
        case None:
            return pb.Number(none=True)
        case bool():
            return pb.Number(truth=value)
        case int() if -(1 << 63) <= value < 1 << 63:
            return pb.Number(whole=value)
        case float():
            return pb.Number(real=value)
    raise StateError(
        f"{name} of the optimizer state is neither a tensor nor a number, but a {type(value).__name__}"
    )


def to_seeds(
    header: pb.SeedHeader, parameters: Iterable[tuple[int, torch.Tensor, Mapping[str, object]]]
) -> Iterator[pb.Seeds]:
    """Yield the messages of a Seed or Fetch stream: the header, all pieces, the checksum.

    `header.parameters` lists the parameters that follow, in any order.
    """
    checksum = Checksum(header)
    yield pb.Seeds(header=header)
    for number, tensor, state in parameters:
        for name, value in {"": tensor, **state}.items():
            if isinstance(value, torch.Tensor):
                yield from _tensor_seeds(number, name, value, checksum)
            else:
                seeds = pb.Seeds(
                    piece=pb.ParameterPiece(parameter=number, state=name, number=to_number(name, value))
                )
                checksum.add(seeds.piece, b"")
                yield seeds
    yield pb.Seeds(checksum=checksum.digest())


class _Piece(NamedTuple):
    """A piece, and its tensor's data: each access to it in the message would copy it."""

    piece: pb.ParameterPiece
    data: bytes


class SeedReader:
    """A stream of `to_seeds`: its `header`, then each parameter as (number, tensor, optimizer state).

    The header is read at once, the rest during iteration.
    Iteration raises `StateError` for gaps, unexpected or missing parameters, and a wrong checksum. The
    checksum comes last, so **data is valid only once iteration has ended without an error**. Tensors are new
    and belong to the caller.
    """

    def __init__(self, seeds: Iterable[pb.Seeds]) -> None:
        """Read the header. Raise `StateError` if there is none."""
        self._seeds = iter(seeds)
        first = next(self._seeds, None)
        if first is None or first.WhichOneof("kind") != "header":
            raise StateError("a stream of seeds begins with its header")
        self.header: pb.SeedHeader = first.header
        self._checksum = Checksum(first.header)

    def read(
        self, layout: Sequence[Parameter] | None
    ) -> Iterator[tuple[int, torch.Tensor, dict[str, object]]]:
        """Yield each parameter: its number, tensor and optimizer state.

        Pieces that do not fit the parameters of the `layout` are refused before memory is allocated.
        `None` accepts all; it is only for seeds of this process itself. Raises `StateError`.
        """
        expected = set(self.header.parameters)
        if layout is not None and (unknown := [number for number in expected if number >= len(layout)]):
            raise StateError(f"parameter {min(unknown)} was announced, but the layout has {len(layout)}")
        for number, pieces in itertools.groupby(self._pieces(), lambda piece: piece.piece.parameter):
            if number not in expected:
                raise StateError(f"parameter {number} was not announced, or comes twice")
            expected.remove(number)
            yield number, *_assemble(number, layout[number] if layout is not None else None, pieces)
        if expected:
            raise StateError(f"{counted(len(expected), 'parameter')} missing, the first: {min(expected)}")

    def read_all(
        self, layout: Sequence[Parameter] | None
    ) -> dict[int, tuple[torch.Tensor, dict[str, object]]]:
        """Return all parameters by number, after the checksum has been verified; see `read`."""
        return {number: (tensor, state) for number, tensor, state in self.read(layout)}

    def _pieces(self) -> Iterator[_Piece]:
        for message in self._seeds:
            match message.WhichOneof("kind"):
                case "piece":
                    piece = _Piece(message.piece, message.piece.tensor.data)
                    self._checksum.add(*piece)
                    yield piece
                case "checksum":
                    if message.checksum != self._checksum.digest():
                        raise StateError("wrong checksum: the data was corrupted")
                    if next(self._seeds, None) is not None:
                        raise StateError("data follows the checksum")
                    return
                case kind:
                    raise StateError(
                        f"a stream of seeds has a {kind or 'message without a kind'} in its middle"
                    )
        raise StateError("the stream of seeds ended before its checksum")


class Checksum:
    """XXH3, 16 bytes, over a stream's header and pieces: names, types and offsets as well as data.

    It is ten times as fast as BLAKE2b, and finds accidents. TLS finds attackers, who could change either.
    """

    def __init__(self, header: pb.SeedHeader) -> None:
        self._hash = xxhash.xxh3_128(header.SerializeToString(deterministic=True))

    def add(self, piece: pb.ParameterPiece, data: bytes | memoryview) -> None:
        """Add the next piece, and its tensor's `data`: the message would copy it at each access."""
        tensor, number = piece.tensor, piece.number
        kind = piece.WhichOneof("value")
        description: tuple[object, ...] = (tensor.dtype, *tensor.shape, tensor.offset, len(data))
        if kind == "number":
            value = number.WhichOneof("kind")
            description = (
                value,
                getattr(number, value).hex() if value == "real" else getattr(number, value or "none"),
            )
        self._hash.update(repr((piece.parameter, piece.state, kind, *description)).encode())
        self._hash.update(data)

    def digest(self) -> bytes:
        """Return the checksum of all pieces so far."""
        return self._hash.digest()


def _tensor_seeds(parameter: int, name: str, tensor: torch.Tensor, checksum: Checksum) -> Iterator[pb.Seeds]:
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPES:
        raise StateError(f"{name or 'a parameter'} has type {dtype}; supported: {', '.join(DTYPES)}")
    data = bytes_of(tensor.detach().cpu().contiguous())
    for offset in range(0, max(len(data), 1), PIECE_BYTES):
        seeds = pb.Seeds()  # filled in place: a message that is passed to another one's constructor is copied
        seeds.piece.parameter, seeds.piece.state = parameter, name
        message, part = seeds.piece.tensor, data[offset : offset + PIECE_BYTES]
        message.dtype, message.offset, message.data = dtype, offset, bytes(part)
        message.shape.extend(tensor.shape)
        checksum.add(seeds.piece, part)
        yield seeds


def _assemble(
    number: int, parameter: Parameter | None, pieces: Iterable[_Piece]
) -> tuple[torch.Tensor, dict[str, object]]:
    """Assemble a parameter and its state from its pieces. Raise `StateError` if there are gaps."""
    entries: dict[str, object] = {}
    for name, run in itertools.groupby(pieces, lambda piece: piece.piece.state):
        if name in entries:
            raise StateError(f"parameter {number}: {name or 'its own data'} comes twice")
        if len(entries) > ENTRIES_MAX or len(name) > NAME_MAX:
            raise StateError(
                f"parameter {number} has more than {ENTRIES_MAX} entries of optimizer state, or one whose "
                f"name has more than {NAME_MAX} characters"
            )
        entries[name] = _value(f"parameter {number}{f', {name}' if name else ''}", parameter, not name, run)
    tensor = entries.pop("", None)
    if not isinstance(tensor, torch.Tensor):
        raise StateError(f"parameter {number} has optimizer state but no data")
    return tensor, entries


def _value(subject: str, parameter: Parameter | None, is_parameter: bool, run: Iterable[_Piece]) -> object:
    pieces = iter(run)
    head = next(pieces)
    first = head.piece
    if first.WhichOneof("value") == "tensor":
        if parameter is not None:
            _check_shape(subject, parameter, is_parameter, first.tensor)
        return _tensor(subject, head, pieces)
    if next(pieces, None) is not None:
        raise StateError(f"{subject}: a number is one piece")
    kind = first.number.WhichOneof("kind")
    if kind is None:
        raise StateError(f"{subject} has no value")
    return None if kind == "none" else getattr(first.number, kind)


def _check_shape(subject: str, parameter: Parameter, is_parameter: bool, first: pb.TensorPiece) -> None:
    """Refuse a tensor, unless a single number, without the parameter's shape, and type if `is_parameter`."""
    shape = tuple(first.shape)
    if is_parameter and (shape, first.dtype) != (parameter.memory_shape, parameter.dtype):
        raise StateError(
            f"{parameter.name} has shape {parameter.memory_shape} and type {parameter.dtype}, but its "
            f"seed has {shape[:8]} and {first.dtype[:NAME_MAX]}"
        )
    if shape != parameter.memory_shape and (len(shape) > 1 or any(size != 1 for size in shape)):
        raise StateError(f"{subject} has shape {shape[:8]}; the parameter has {parameter.memory_shape}")


def _tensor(subject: str, head: _Piece, more: Iterator[_Piece]) -> torch.Tensor:
    first = head.piece.tensor
    dtype = DTYPES.get(first.dtype)
    if dtype is None or any(size < 0 for size in first.shape):
        raise StateError(
            f"{subject} is not a tensor: type {first.dtype[:NAME_MAX]}, shape {list(first.shape[:8])}"
        )
    nbytes = math.prod(first.shape) * dtype.itemsize
    if first.offset or (nbytes and not head.data):
        raise StateError(f"{subject} does not begin with its first bytes")
    tensor = torch.empty(list(first.shape), dtype=dtype)
    whole = bytes_of(tensor)
    at = 0
    for message, data in itertools.chain([head], more):
        piece = message.tensor
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            raise StateError(f"{subject} changes its type or shape between pieces")
        if piece.offset != at or at + len(data) > nbytes:
            raise StateError(f"{subject} has a gap: offset {piece.offset} of {nbytes} follows {at}")
        whole[at : at + len(data)] = data
        at += len(data)
    if at != nbytes:
        raise StateError(f"{subject} has a gap: it ends after {at} of {nbytes} bytes")
    return tensor
