"""Parameters and optimizer state as messages, and back, bit for bit; other state as bytes.

Pure. A parameter goes as pieces of 1 MiB or less: first its own, then those of each entry of its optimizer
state. A checksum ends a stream of them, so that nothing that it gave counts before it ended well.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from checkmate.rpc import shadow_pb2 as pb

PIECE_BYTES: Final = 1 << 20
"""A piece has at most so much tensor data."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""Types that a tensor of a parameter or its state may have."""

_LOOKED_AT: Final = 1000
"""Of state with more values than this it is tried whether it can be read."""

_NO_MORE: Final = object()
_ZIP: Final = b"PK\x03\x04"
_UNREADABLE: Final = (
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What `torch.load` raises, depending on where in the bytes the fault is."""


class StateError(ValueError):
    """State that can't be sent, or what came is not what was sent."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writing them writes the tensor."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return memoryview(bytearray())
    data: Any = flat.view(torch.uint8).numpy()  # a buffer, as NumPy's types don't say
    return memoryview(data)


def to_pieces(
    parameter: int, tensor: torch.Tensor, state: Mapping[str, object]
) -> Iterator[pb.ParameterPiece]:
    """A parameter and its optimizer state as pieces of `PIECE_BYTES` of data at most.

    Tensors are copied into the pieces and nowhere else, unless they are on another device or not contiguous.
    `StateError` names an entry that is neither a tensor nor a number.
    """
    yield from _tensor_pieces(parameter, "", tensor)
    for name, value in state.items():
        if not name:
            raise StateError("an entry of the optimizer state has an empty name")
        if isinstance(value, torch.Tensor):
            yield from _tensor_pieces(parameter, name, value)
        else:
            yield pb.ParameterPiece(parameter=parameter, state=name, number=_number(name, value))


def to_seeds(
    header: pb.SeedHeader, parameters: Iterable[tuple[int, torch.Tensor, Mapping[str, object]]]
) -> Iterator[pb.Seeds]:
    """The messages of a Seed or Fetch stream: the header, all pieces, the checksum.

    `header.parameters` names those that follow, in any order.
    """
    checksum = Checksum(header)
    yield pb.Seeds(header=header)
    for number, tensor, state in parameters:
        for piece in to_pieces(number, tensor, state):
            checksum.add(piece)
            yield pb.Seeds(piece=piece)
    yield pb.Seeds(checksum=checksum.digest())


def from_seeds(seeds: Iterable[pb.Seeds]) -> SeedReader:
    """Read what `to_seeds` sent: the header at once, the rest as it is iterated."""
    return SeedReader(seeds)


class SeedReader:
    """A stream of seeds: its `header`, then each parameter as (number, tensor, optimizer state).

    Iterating raises `StateError` for a hole, a stranger, a missing parameter or a wrong checksum. The
    checksum comes last, so **nothing counts until iteration has ended without an error**. Tensors are new and
    belong to the caller.
    """

    def __init__(self, seeds: Iterable[pb.Seeds]) -> None:
        self._seeds = iter(seeds)
        first = next(self._seeds, None)
        if first is None or first.WhichOneof("kind") != "header":
            raise StateError("a stream of seeds begins with its header")
        self.header: pb.SeedHeader = first.header
        self._checksum = Checksum(first.header)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, dict[str, object]]]:
        expected = set(self.header.parameters)
        for number, pieces in itertools.groupby(self._pieces(), lambda piece: piece.parameter):
            if number not in expected:
                raise StateError(f"parameter {number} is not among those announced, or comes twice")
            expected.remove(number)
            yield number, *_assemble(number, pieces)
        if expected:
            raise StateError(f"{len(expected)} parameters are missing, the first: {min(expected)}")

    def all(self) -> dict[int, tuple[torch.Tensor, dict[str, object]]]:
        """Every parameter by its number, once the checksum is found right."""
        return {number: (tensor, state) for number, tensor, state in self}

    def _pieces(self) -> Iterator[pb.ParameterPiece]:
        for message in self._seeds:
            match message.WhichOneof("kind"):
                case "piece":
                    self._checksum.add(message.piece)
                    yield message.piece
                case "checksum":
                    if message.checksum != self._checksum.digest():
                        raise StateError("the checksum is wrong: what came is not what was sent")
                    if next(self._seeds, _NO_MORE) is not _NO_MORE:
                        raise StateError("something follows the checksum")
                    return
                case kind:
                    raise StateError(
                        f"a stream of seeds has a {kind or 'message without a kind'} in its middle"
                    )
        raise StateError("the stream of seeds ended before its checksum")


class Checksum:
    """BLAKE2b, 16 bytes, over a stream's header and pieces: names, types and places as well as data."""

    def __init__(self, header: pb.SeedHeader) -> None:
        self._hash = hashlib.blake2b(header.SerializeToString(deterministic=True), digest_size=16)

    def add(self, piece: pb.ParameterPiece) -> None:
        """Take in the next piece."""
        tensor, number = piece.tensor, piece.number
        kind = piece.WhichOneof("value")
        said: tuple[object, ...] = (tensor.dtype, *tensor.shape, tensor.offset, len(tensor.data))
        if kind == "number":
            value = number.WhichOneof("kind")
            said = (
                value,
                getattr(number, value).hex() if value == "real" else getattr(number, value or "none"),
            )
        self._hash.update(repr((piece.parameter, piece.state, kind, *said)).encode())
        self._hash.update(tensor.data)

    def digest(self) -> bytes:
        """The checksum so far."""
        return self._hash.digest()


def dumps(obj: object, *, known: bool = False) -> bytes:
    """`torch.save` of plain state: tensors, numbers, strings, bytes, None, and containers of them.

    `StateError` where `loads` could not read it again, which reads nothing that could run code. That is
    tried, unless it is `known` or seen that all of it is plain.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        if not known and not _is_plain(obj):
            loads(buffer.getvalue())
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything while it is pickled
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StateError(
            "only tensors, NumPy arrays, numbers, strings, bytes, None, and lists, tuples and dicts of them "
            f"can be kept: {reason}"
        ) from None
    return buffer.getvalue()


def _is_plain(obj: object) -> bool:
    """Whether `loads` is sure to read it: then it needn't be tried, which takes thrice as long as writing."""
    waiting = [obj]
    for _ in range(_LOOKED_AT):
        if not waiting:
            return True
        one: Any = waiting.pop()
        kind = type(one)
        if kind is dict:
            waiting += [*one.keys(), *one.values()]
        elif kind in (list, tuple):
            waiting += one
        elif not (kind in (bool, float, str, type(None)) or (kind is int and one.bit_length() < 64)):
            return False
    return False


def loads(data: bytes) -> Any:
    """What `dumps` was given, tensors on the CPU; `StateError` where the bytes are no such state."""
    if not data.startswith(_ZIP):
        raise StateError("unreadable state: no archive of torch.save")
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise StateError(f"unreadable state: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    found = str(error).partition("WeightsUnpickler error: ")[2] or str(error) or type(error).__name__
    return found.strip().splitlines()[0]


def _numpy_globals() -> list[Any]:
    """What a pickle of NumPy arrays and numbers calls; none of it runs code of the pickle's choosing."""
    array = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}
    return [array, scalar, np.ndarray, np.dtype, *dtypes, bytes, _encode_codec()]


def _encode_codec() -> Any:
    import _codecs  # noqa: PLC0415 - by which pickle's protocol 2 spells bytes

    return _codecs.encode


def _tensor_pieces(parameter: int, name: str, tensor: torch.Tensor) -> Iterator[pb.ParameterPiece]:
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPES:
        raise StateError(f"{name or 'a parameter'} has type {dtype}; it may be {', '.join(DTYPES)}")
    data = bytes_of(tensor.detach().cpu().contiguous())
    for offset in range(0, max(len(data), 1), PIECE_BYTES):
        piece = pb.TensorPiece(
            dtype=dtype, shape=tensor.shape, offset=offset, data=bytes(data[offset : offset + PIECE_BYTES])
        )
        yield pb.ParameterPiece(parameter=parameter, state=name, tensor=piece)


def _number(name: str, value: object) -> pb.Number:
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


def _assemble(number: int, pieces: Iterable[pb.ParameterPiece]) -> tuple[torch.Tensor, dict[str, object]]:
    """The parameter and its state from all pieces of it; `StateError` for a hole."""
    found: dict[str, object] = {}
    for name, run in itertools.groupby(pieces, lambda piece: piece.state):
        if name in found:
            raise StateError(f"parameter {number}: {name or 'its own data'} comes twice")
        found[name] = _value(f"parameter {number}{f', {name}' if name else ''}", run)
    tensor = found.pop("", None)
    if not isinstance(tensor, torch.Tensor):
        raise StateError(f"parameter {number} has optimizer state and no data of its own")
    return tensor, found


def _value(what: str, run: Iterable[pb.ParameterPiece]) -> object:
    pieces = iter(run)
    first = next(pieces)
    if first.WhichOneof("value") == "tensor":
        return _tensor(what, first.tensor, pieces)
    if next(pieces, None) is not None:
        raise StateError(f"{what}: a number is one piece")
    kind = first.number.WhichOneof("kind")
    if kind is None:
        raise StateError(f"{what} has no value")
    return None if kind == "none" else getattr(first.number, kind)


def _tensor(what: str, first: pb.TensorPiece, more: Iterator[pb.ParameterPiece]) -> torch.Tensor:
    dtype = DTYPES.get(first.dtype)
    if dtype is None or any(size < 0 for size in first.shape):
        raise StateError(f"{what} is no tensor: type {first.dtype}, shape {list(first.shape)}")
    nbytes = math.prod(first.shape) * dtype.itemsize
    if first.offset or (nbytes and not first.data):
        raise StateError(f"{what} doesn't begin with its first bytes")
    tensor = torch.empty(list(first.shape), dtype=dtype)
    data = bytes_of(tensor)
    at = 0
    for piece in itertools.chain([first], (one.tensor for one in more)):
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            raise StateError(f"{what} changes its type or shape between pieces")
        if piece.offset != at or at + len(piece.data) > nbytes:
            raise StateError(f"{what} has a hole: {piece.offset} of {nbytes} bytes follows {at}")
        data[at : at + len(piece.data)] = piece.data
        at += len(piece.data)
    if at != nbytes:
        raise StateError(f"{what} has a hole: it ends after {at} of {nbytes} bytes")
    return tensor
