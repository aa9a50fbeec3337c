"""Conversion of the states of a rank's random generators to bytes, and back. Pure.

They have their own message, because `torch.save` takes ten times as long, in every iteration of every rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import torch
from google.protobuf.message import DecodeError

from checkmate.rpc import shadow_pb2 as pb
from checkmate.state.tensors import StateError, bytes_of


def dump_generators(found: Mapping[str, Any]) -> bytes:
    """Return the states of generators as bytes.

    Args:
        found: `torch`, `cuda` (tensors of bytes or `None`), `python` and `numpy`, as returned by the
            generators. `in_loop`, if present, is true if they were captured between two batches of one
            iterator. Words may be bytes of native uint32, as from `load_generators`.
    """
    message = pb.Generators(in_loop=bool(found.get("in_loop")))
    for name in ("torch", "cuda"):
        if found.get(name) is not None:
            setattr(message, name, bytes(bytes_of(found[name])))
    if "python" in found:
        version, words, gauss = found["python"]
        message.python.CopyFrom(pb.PythonGenerator(version=version, words=_packed(words), gauss=gauss))
    if "numpy" in found:
        kind, words, position, has_gauss, gauss = found["numpy"]
        state = pb.NumpyGenerator(
            kind=kind, words=_packed(words), position=position, has_gauss=has_gauss, gauss=gauss
        )
        message.numpy.CopyFrom(state)
    return message.SerializeToString()


def load_generators(data: bytes) -> dict[str, Any]:
    """Return the argument of `dump_generators`, with words as bytes. Raise `StateError` if invalid."""
    try:
        message = pb.Generators.FromString(data)
    except DecodeError as error:
        raise StateError(f"unreadable states of random generators: {error}") from None
    found: dict[str, Any] = {"cuda": None}
    if message.in_loop:
        found["in_loop"] = True
    for name in ("torch", "cuda"):
        if state := getattr(message, name):
            found[name] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if message.HasField("python"):
        python = message.python
        found["python"] = (
            python.version,
            python.words,
            python.gauss if python.HasField("gauss") else None,
        )
    if message.HasField("numpy"):
        numpy = message.numpy
        found["numpy"] = (numpy.kind, numpy.words, numpy.position, numpy.has_gauss, numpy.gauss)
    return found


def _packed(words: Any) -> bytes:
    """Return words as bytes of native uint32."""
    return words if isinstance(words, bytes) else array("I", words).tobytes()
