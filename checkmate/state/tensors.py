"""Supported tensors in state, their bytes and order of dimensions; frozen state, and generators. Pure."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from google.protobuf.message import DecodeError

from checkmate.errors import CheckmateError
from checkmate.rpc import shadow_pb2 as pb
from checkmate.wire.parameter import Parameter

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
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
"""Supported types of tensors, by name."""

Values = tuple[torch.Tensor, dict[str, object]]
"""A parameter and its optimizer state."""


class StateError(CheckmateError, ValueError):
    """State cannot be converted, or received data is invalid."""

    iteration: int | None = None
    """The iteration whose record can't have it, if that is not the present one."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a writable view, without a copy."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return memoryview(bytearray())
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # a single element may have any stride, and `view` wants 1
    data: Any = flat.view(torch.uint8).numpy()  # a buffer, though not according to NumPy's types
    return memoryview(data)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether floating-point tensors of one type and shape have the same bits. All NaNs are alike."""
    integers = _INTEGERS[first.element_size()]
    differ = first.view(integers) != second.view(integers)
    return bool((first.isnan() & second.isnan())[differ].all())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: the local part of a DTensor, else the tensor itself.

    Importing DTensor takes seconds, so it is recognised by its method.
    """
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # else it is a part of autograd's graph
        local: torch.Tensor = tensor.to_local()
    return local


def sharded_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return this rank's part of something, as a DTensor if the parameter is one and has its shape."""
    local = local_of(parameter)
    if local is parameter or not isinstance(value, torch.Tensor) or value.shape != local.shape:
        return value
    if local_of(value) is not value:
        return value
    like: Any = parameter
    if local.device.type != like.device_mesh.device_type:  # offloaded: `from_local` would move it to the GPU
        sharded = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
        local_of(sharded).copy_(value)
        return sharded
    return type(like).from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def in_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a tensor with its dimensions in the given order, or unchanged if `order` is empty."""
    return tensor.permute(*order) if order else tensor


def from_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the argument of `in_memory_order`, with the same strides if it is contiguous."""
    return tensor.permute([order.index(d) for d in range(len(order))]) if order else tensor


def to_held(parameter: Parameter, tensor: torch.Tensor, state: Mapping[str, object]) -> Values:
    """Convert a parameter and its state from the script's form to that of shadow nodes."""
    return _turned(in_memory_order, parameter.dim_order, tensor, state)


def from_held(parameter: Parameter, tensor: torch.Tensor, state: Mapping[str, object]) -> Values:
    """Convert a parameter and its state from the form of shadow nodes to the script's."""
    return _turned(from_memory_order, parameter.dim_order, tensor, state)


def _turned(
    turn: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    order: Sequence[int],
    tensor: torch.Tensor,
    state: Mapping[str, object],
) -> Values:
    """Convert a parameter, and all tensors of its state that have the parameter's shape."""
    return turn(tensor, order), {
        name: turn(value, order) if isinstance(value, torch.Tensor) and value.shape == tensor.shape else value
        for name, value in state.items()
    }


_TENSOR: Final = "tensor"
_NAME: Final = re.compile(
    r"optimizer\.state\[(?P<index>\d+)\]\[(?P<place>\d+)\](\[(?P<parameter>\"([^\"\\]|\\.)*\")\])?"
    r"\.(?P<entry>.+) \((?P<kind>\w+)\)",
    re.DOTALL,
)
"""Names contain the place of an entry because buffers have no order. No buffer has such a name."""
_NUMBERS: Final = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


def is_frozen_state(name: str) -> bool:
    """Return whether a name among the buffers is such state."""
    return _NAME.fullmatch(name) is not None


def frozen_parameter(name: str) -> str:
    """Return the name of the parameter to which such state belongs, or "" if it is unknown."""
    match = _NAME.fullmatch(name)
    return str(json.loads(match["parameter"])) if match is not None and match["parameter"] else ""


def name_frozen(
    index: int, entries: Mapping[str, object], parameter: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state of a parameter as named tensors.

    Args:
        index: The parameter's number in `optimizer.state_dict()`.
        entries: Its state.
        parameter: Its name in the model, if it has one.

    Raises:
        StateError: An entry is neither a tensor nor a number.
    """
    suffix = f"[{json.dumps(parameter)}]" if parameter else ""
    for place, (entry, value) in enumerate(entries.items()):
        kind = _TENSOR if isinstance(value, torch.Tensor) else type(value).__name__
        if isinstance(value, torch.Tensor):
            tensor = value
        elif value is None:
            tensor = torch.empty(0)
        elif kind in _NUMBERS:
            tensor = torch.tensor(value, dtype=_NUMBERS[kind])
        else:
            raise StateError(f"{entry} of the optimizer state is neither a tensor nor a number, but a {kind}")
        yield f"optimizer.state[{index}][{place}]{suffix}.{entry} ({kind})", tensor


def frozen_states(tensors: Mapping[str, torch.Tensor]) -> dict[int, dict[str, object]]:
    """Return the state of each such parameter, by its number. Ignore other names."""
    states: dict[int, dict[str, object]] = {}
    matches = [match for name in tensors if (match := _NAME.fullmatch(name)) is not None]
    for match in sorted(matches, key=lambda match: (int(match["index"]), int(match["place"]))):
        tensor = tensors[match.string]
        number = tensor.item() if match["kind"] != _TENSOR and tensor.numel() else None
        value = tensor if match["kind"] == _TENSOR else number
        states.setdefault(int(match["index"]), {})[match["entry"]] = value
    return states


_FLAGS: Final = ("in_loop", "marks", "still")


def dump_generators(states: Mapping[str, Any]) -> bytes:
    """Return the states of generators as bytes.

    Args:
        states: `torch`, `cuda` (tensors of bytes or `None`), `python` and `numpy`, as returned by the
            generators. `in_loop`, if present, is true if they were captured between two batches of one
            iterator, `marks` if the script marks its iterations, and `still` if they do not move between an
            iteration's end and the next forward. Words may be bytes of native uint32, as from
            `load_generators`.
    """
    message = pb.Generators()
    for flag in _FLAGS:
        setattr(message, flag, bool(states.get(flag)))
    for name in ("torch", "cuda"):
        if states.get(name) is not None:
            setattr(message, name, bytes(bytes_of(states[name])))
    if "python" in states:
        message.python.version, words, gauss = states["python"]
        message.python.words = _packed(words)
        if gauss is not None:
            message.python.gauss = gauss
    if "numpy" in states:
        numpy = message.numpy
        numpy.kind, words, numpy.position, numpy.has_gauss, numpy.gauss = states["numpy"]
        numpy.words = _packed(words)
    return message.SerializeToString()


def load_generators(data: bytes) -> dict[str, Any]:
    """Return the argument of `dump_generators`, with words as bytes. Raise `StateError` if invalid."""
    try:
        message = pb.Generators.FromString(data)
    except DecodeError as error:
        raise StateError(f"unreadable states of random generators: {error}") from None
    states: dict[str, Any] = {"cuda": None}
    states |= {name: True for name in _FLAGS if getattr(message, name)}
    for name in ("torch", "cuda"):
        if state := getattr(message, name):
            states[name] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if message.HasField("python"):
        python = message.python
        states["python"] = (
            python.version,
            python.words,
            python.gauss if python.HasField("gauss") else None,
        )
    if message.HasField("numpy"):
        numpy = message.numpy
        states["numpy"] = (numpy.kind, numpy.words, numpy.position, numpy.has_gauss, numpy.gauss)
    return states


def _packed(words: Any) -> bytes:
    """Return words as bytes of native uint32."""
    if isinstance(words, np.ndarray) and words.dtype == np.uint32:
        return words.tobytes()
    return words if isinstance(words, bytes) else array("I", words).tobytes()
