"""Conversion of plain state to bytes, and back. Pure.

The bytes are a magic number, the length of a JSON text, that text, and the blobs that it refers to: the bytes
of tensors, arrays and strings of bytes. Pickle is not used, not even a restricted one: what reads such bytes
builds the kinds of values in `_KINDS`, and nothing else. So whoever writes them can give it no code, no other
classes, no nesting that overflows the stack, and no more data than was sent.

In the text, numbers, strings and `None` stand for themselves, and a list for a list. Everything else is an
object with one key, its kind. A blob is referred to by its number, and lies in memory once, so that tensors
which shared all of their memory share it again.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from checkmate.base.wording import with_article
from checkmate.state.tensors import StateError, bytes_of, dtype_name, from_memory_order, in_memory_order

_MAGIC: Final = b"CMS1"
_LENGTH: Final = struct.Struct("<I")
MAX_TEXT: Final = 64 << 20
"""Bytes of JSON: read, they take about thirty times as much memory."""
MAX_DEPTH: Final = 64
_TOO_LARGE: Final = (
    f"more than {MAX_TEXT >> 20} MiB of numbers and names beside tensors can't be stored: keep long lists as "
    "tensors"
)
_MANY: Final = 1 << 19
"""Lists and mappings after which all that are to come are counted."""
_SCALARS: Final = frozenset((bool, int, float, str, type(None)))
_NUMPY_TYPE: Final = re.compile(r"[<>|][biufc]\d{1,2}")

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    dtype_name(dtype): dtype
    for dtype in vars(torch).values()
    # Types of less than a byte, and quantised ones, have no bytes of their own.
    if isinstance(dtype, torch.dtype) and not re.match(r"q|bits|u?int[1-7]$|float4", dtype_name(dtype))
}


def dumps(obj: object) -> bytes:
    """Return plain state as bytes.

    Tensors, NumPy's arrays and numbers, numbers, strings, bytes, None, and lists, tuples, sets, dicts,
    OrderedDicts and Counters of them are plain. Tensors come back on the CPU. Raises `StateError`, which says
    where it is, for anything else.
    """
    writer = _Writer(obj)
    try:
        node = writer.node(obj, ())
        text = json.dumps(
            {"blobs": [len(blob) for blob in writer.blobs], "value": node}, separators=(",", ":")
        )
    except (
        ValueError,
        RuntimeError,
        NotImplementedError,
    ) as error:  # a number of 4,301 digits; a meta tensor
        raise error if isinstance(error, StateError) else StateError(f"can't be stored: {error}") from None
    if len(text) > MAX_TEXT:
        raise StateError(_TOO_LARGE)
    return b"".join([_MAGIC, _LENGTH.pack(len(text)), text.encode("ascii"), *writer.blobs])


def loads(data: bytes) -> Any:
    """Return the argument of `dumps`, with tensors on the CPU. Raise `StateError` if it is invalid."""
    try:
        return _Reader(data).value
    except StateError as error:
        raise StateError(f"unreadable state: {error}") from None
    except Exception as error:  # noqa: BLE001 - whatever the JSON parser, torch and NumPy raise for nonsense
        raise StateError(
            f"unreadable state: {next(iter(str(error).splitlines()), type(error).__name__)}"
        ) from None


EXTRA_STATE: Final = "_extra_state"
"""The last part of the name of what a module's `get_extra_state` returns, as in `state_dict()`."""


def is_extra_state(name: str) -> bool:
    """Return whether a name among the buffers is such state, which is `packed`."""
    return name == EXTRA_STATE or name.endswith(f".{EXTRA_STATE}")


def packed(obj: object) -> torch.Tensor:
    """Return plain state as a tensor of bytes, so that it can be kept among buffers. Raises as `dumps`."""
    return torch.frombuffer(bytearray(dumps(obj)), dtype=torch.uint8)


def unpacked(tensor: torch.Tensor) -> Any:
    """Return the argument of `packed`. Raise `StateError` if it is invalid."""
    return loads(bytes(bytes_of(tensor.contiguous())))


class _Writer:
    """The text of a value, and its blobs."""

    def __init__(self, whole: object) -> None:
        self.blobs: list[bytes | bytearray | memoryview] = []
        self._whole = whole
        self._items = self._containers = 0
        self._numbers: dict[tuple[object, ...], int] = {}
        self._alive: list[torch.Tensor] = []
        """Tensors whose memory is in `blobs`, or whose address is in `_numbers`."""

    def node(self, value: Any, path: tuple[object, ...]) -> Any:
        """Return a value as JSON's data. `path`: the keys that lead to it."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if len(path) > MAX_DEPTH:
            raise StateError(
                f"{_place(path[:3])} is nested more than {MAX_DEPTH} deep, which can't be stored"
            )
        if kind in _LISTS:
            items = list(value)
            self._count(len(items))
            if set(map(type, items)) - _SCALARS:
                items = [self.node(item, (*path, index)) for index, item in enumerate(items)]
            return items if kind is list else {_LISTS[kind]: items}
        if kind in _MAPPINGS:
            self._count(len(value))
        if kind is dict and all(type(key) is str for key in value):
            return {"dict": {key: self.node(item, (*path, key)) for key, item in value.items()}}
        if kind in _MAPPINGS:
            pairs = [
                [self.node(key, (*path, key)), self.node(item, (*path, key))] for key, item in value.items()
            ]
            return {_MAPPINGS[kind]: pairs}
        if kind in _TENSORS:
            return {"tensor": self._tensor(value)}
        if kind in (bytes, bytearray):
            return {kind.__name__: self._blob(value)}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if kind is np.ndarray and _NUMPY_TYPE.fullmatch(value.dtype.str):
            order = "F" if value.flags.fnc else "C"
            return {"array": [value.dtype.str, list(value.shape), order, self._blob(value.tobytes(order))]}
        if isinstance(value, np.generic) and _NUMPY_TYPE.fullmatch(value.dtype.str):
            return {"scalar": [value.dtype.str, value.tobytes().hex()]}
        raise StateError(
            "only tensors, NumPy arrays, numbers, strings, bytes, None, and lists, tuples and dicts of them "
            f"can be stored, and {_place(path)} is {with_article(kind.__name__)}"
        )

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.layout is not torch.strided or dtype_name(tensor.dtype) not in _DTYPES:
            kind = f"{dtype_name(tensor.dtype)}, {str(tensor.layout).removeprefix('torch.')}"
            raise StateError(f"a tensor of type {kind} can't be stored: give its parts")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        order: list[int] = []
        if not plain.is_contiguous():
            order = sorted(range(plain.dim()), key=plain.stride().__getitem__, reverse=True)
        ordered = in_memory_order(plain, order)
        if not ordered.is_contiguous():  # neither is it dense in another order
            order, ordered = [], plain.contiguous()
        where = (ordered.data_ptr(), ordered.numel() * ordered.element_size())
        number = self._numbers.get(where) if where[1] else None
        if number is None:
            self._alive.append(ordered)
            number = self._numbers[where] = self._blob(bytes_of(ordered))
        flags = int(tensor.requires_grad) + 2 * (type(tensor) is nn.Parameter)
        return [dtype_name(tensor.dtype), list(tensor.shape), order, number, flags]

    def _count(self, items: int) -> None:
        """Refuse lists that contain others twice, and these others twice, before they are written out."""
        self._items += items
        self._containers += 1
        # Writing these has taken a second; the rest could take half a minute before it is too much.
        total = self._items if self._containers != _MANY else _written_items(self._whole, {}, 0)
        if total > MAX_TEXT // 2:  # each takes two bytes at least
            raise StateError(_TOO_LARGE)

    def _blob(self, blob: bytes | bytearray | memoryview) -> int:
        self.blobs.append(blob)
        return len(self.blobs) - 1


def _written_items(value: Any, counts: dict[int, int], depth: int) -> int:
    """Return the number of items of a value if each list is written as often as it is contained.

    `counts`: that of the lists and mappings seen before, by id.
    """
    kind = type(value)
    if depth > MAX_DEPTH or (kind not in _LISTS and kind not in _MAPPINGS):
        return 0  # what is nested too deep is refused when it is written
    if id(value) not in counts:
        children = [*value, *value.values()] if kind in _MAPPINGS else value
        counts[id(value)] = len(value) + sum(_written_items(child, counts, depth + 1) for child in children)
    return counts[id(value)]


class _Reader:
    """The value that a text and its blobs describe. What it raises is for `loads`."""

    def __init__(self, data: bytes) -> None:
        if data[: len(_MAGIC)] != _MAGIC:
            raise StateError("it does not begin as Checkmate's state does")
        (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
        begin = len(_MAGIC) + _LENGTH.size
        if length > min(MAX_TEXT, len(data) - begin):
            raise StateError("its text is too long")
        whole = json.loads(data[begin : begin + length].decode("ascii"))
        self._blobs: list[memoryview] = []
        self._memory: dict[int, torch.Tensor] = {}
        self._bytes: dict[int, bytes] = {}
        begin += length
        for size in whole["blobs"]:
            if type(size) is not int or not 0 <= size <= len(data) - begin:
                raise StateError("its blobs have other sizes")
            self._blobs.append(memoryview(data)[begin : begin + size])
            begin += size
        if begin != len(data):
            raise StateError("its blobs have other sizes")
        self.value = self._value(whole["value"], 0)

    def _value(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if kind in _SCALARS:
            return node
        if depth > MAX_DEPTH:
            raise StateError(f"it is nested more than {MAX_DEPTH} deep")
        if kind is list:
            return self._items(node, depth)
        (name,) = node
        return _KINDS[name](self, node[name], depth)

    def _items(self, node: list[Any], depth: int) -> list[Any]:
        if not set(map(type, node)) - _SCALARS:
            return node
        return [self._value(item, depth + 1) for item in node]

    def _mapping(self, node: dict[str, Any], depth: int) -> dict[str, Any]:
        return {key: self._value(item, depth + 1) for key, item in node.items()}

    def _pairs(self, node: list[Any], depth: int) -> list[tuple[Any, Any]]:
        return [(self._value(key, depth + 1), self._value(item, depth + 1)) for key, item in node]

    def _tensor(self, node: list[Any], _: int) -> torch.Tensor:
        name, shape, order, number, flags = node
        dtype = _DTYPES[name]
        sizes = _sizes(shape)
        if order and sorted(order) != list(range(len(sizes))):
            raise StateError("a tensor's dimensions have no order")
        tensor = self._tensor_memory(number).view(dtype)
        if dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise StateError("a truth value is neither 0 nor 1")
        tensor = from_memory_order(tensor.reshape([sizes[d] for d in order] if order else sizes), order)
        if flags & 2:
            return nn.Parameter(tensor, requires_grad=bool(flags & 1))
        return tensor.requires_grad_(bool(flags & 1))

    def _tensor_memory(self, number: int) -> torch.Tensor:
        """Return a blob as a tensor of bytes: the same memory at each call."""
        if number not in self._memory:
            memory = bytearray(self._blob(number))
            tensor = (
                torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
            )
            self._memory[number] = tensor
        return self._memory[number]

    def _array(self, node: list[Any], _: int) -> Any:
        name, shape, order, number = node
        flat = _numbers_of(bytearray(self._blob(number)), name)
        return flat.reshape(_sizes(shape), order="F" if order == "F" else "C")

    def _scalar(self, node: list[Any], _: int) -> Any:
        name, digits = node
        (value,) = _numbers_of(bytes.fromhex(digits), name)
        return value

    def _bytes_of(self, number: int) -> bytes:
        if number not in self._bytes:
            self._bytes[number] = bytes(self._blob(number))
        return self._bytes[number]

    def _blob(self, number: int) -> memoryview:
        if type(number) is not int or number < 0:
            raise StateError("it refers to a blob that is not there")
        return self._blobs[number]


_LISTS: Final[Mapping[type, str]] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: Final[Mapping[type, str]] = {dict: "pairs", OrderedDict: "ordered", Counter: "counter"}
_TENSORS: Final = (torch.Tensor, nn.Parameter)
_KINDS: Final[Mapping[str, Callable[[_Reader, Any, int], Any]]] = {
    "dict": _Reader._mapping,
    "pairs": lambda reader, node, depth: dict(reader._pairs(node, depth)),
    "ordered": lambda reader, node, depth: OrderedDict(reader._pairs(node, depth)),
    "counter": lambda reader, node, depth: Counter(dict(reader._pairs(node, depth))),
    "tuple": lambda reader, node, depth: tuple(reader._items(node, depth)),
    "set": lambda reader, node, depth: set(reader._items(node, depth)),
    "frozenset": lambda reader, node, depth: frozenset(reader._items(node, depth)),
    "size": lambda _, node, __: torch.Size(_sizes(node)),
    "complex": lambda _, node, __: complex(*node),
    "bytes": lambda reader, node, _: reader._bytes_of(node),
    "bytearray": lambda reader, node, _: bytearray(reader._bytes_of(node)),
    "dtype": lambda _, node, __: _DTYPES[node],
    "device": lambda _, node, __: torch.device(node),
    "tensor": _Reader._tensor,
    "array": _Reader._array,
    "scalar": _Reader._scalar,
}
"""The method that builds each kind of value."""


def _sizes(shape: Iterable[Any]) -> list[int]:
    sizes = list(shape)
    if any(type(size) is not int or not 0 <= size < 1 << 63 for size in sizes) or math.prod(sizes) >= 1 << 63:
        raise StateError("a shape is none")
    return sizes


def _numbers_of(data: bytes | bytearray, name: Any) -> np.ndarray[Any, Any]:
    """Return bytes as a flat array of one of NumPy's types of numbers."""
    if not (isinstance(name, str) and _NUMPY_TYPE.fullmatch(name)):
        raise StateError("a type of NumPy is none of numbers")
    dtype = np.dtype(name)
    if dtype == np.bool_ and data.translate(None, b"\0\1"):
        raise StateError("a truth value is neither 0 nor 1")
    return np.frombuffer(data, dtype)


def _place(path: tuple[object, ...]) -> str:
    return "".join(f"[{key!r}]"[:60] for key in path) or "this"
