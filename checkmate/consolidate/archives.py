"""Pickles that PyTorch has written, in `torch.save` files and indexes, checked before they are read.

PyTorch's own restricted reader builds tensors and plain values only. But a tuple that is nested 400,000 deep,
as a dictionary's key, overflows the stack of the process that hashes it, whatever builds it.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from pathlib import Path
from typing import IO, Any, Final

import torch

from checkmate.base.opening import open_file
from checkmate.state import StateError

MAX_DEPTH: Final = 64
"""The depth of tuples in tuples."""
_TUPLES: Final = frozenset(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"))
_GETS: Final = frozenset(("GET", "BINGET", "LONG_BINGET"))
_PUTS: Final = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))


def load(source: bytes | Path, *, mapped: bool = False) -> Any:
    """Return what `torch.save` has written, on the CPU. With `mapped`, tensors stay in the file until used.

    Raises:
        StateError: It is not such an archive, or not of tensors and plain values.
        OSError: The file can't be read.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else open_file(source) as data:
        try:
            check_nesting(_pickle_of(data))
            data.seek(0)
            # Through the descriptor, so that nobody puts another file in its place.
            source_path = f"/proc/self/fd/{data.fileno()}" if mapped else data
            return torch.load(source_path, map_location="cpu", weights_only=True, mmap=mapped)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever zipfile and torch raise for nonsense
            raise StateError(f"not an archive of tensors and plain values: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return why, without torch's advice to read it unrestricted."""
    text = str(error) or type(error).__name__
    if match := re.search(r"(?:WeightsUnpickler error: |(?=Trying to load unsupported ))(.+)", text):
        return match[1]
    return "it has other values" if text.startswith("Weights only load failed") else text.splitlines()[0]


def _pickle_of(file: IO[bytes]) -> bytes:
    """Return the pickle in an archive. Refuse one that becomes larger when it is read."""
    size = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise StateError("it is compressed, which PyTorch never does")
        if sum(entry.file_size for entry in entries) > size:
            raise StateError("its entries overlap")
        (name,) = (entry for entry in entries if entry.filename.endswith("data.pkl"))
        return archive.read(name)


def check_nesting(pickled: bytes) -> None:
    """Raise `StateError` if a pickle nests tuples deeper than `MAX_DEPTH`. Builds nothing.

    Lists and dictionaries have no hash, and Python bounds what else goes through them.
    """
    stack: list[int] = []
    """The depth of tuples in each value; -1 is a mark."""
    memo: dict[Any, int] = {}
    for code, argument, _ in pickletools.genops(pickled):
        if code.name in _GETS:
            stack.append(memo[argument])
            continue
        if code.name in _PUTS:
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        if code.name == "DUP":
            stack.append(stack[-1])
            continue
        if code.name == "MARK":
            stack.append(-1)
            continue
        depths = _pop(stack, code)
        depth = max(depths, default=0) + (code.name in _TUPLES)
        if depth > MAX_DEPTH:
            raise StateError(f"tuples are nested more than {MAX_DEPTH} deep")
        stack += [depth] * len(code.stack_after)


def _pop(stack: list[int], code: pickletools.OpcodeInfo) -> list[int]:
    """Take what an operation uses from the stack, and return it."""
    before, depths = code.stack_before, list[int]()
    if pickletools.markobject in before:
        before = before[: before.index(pickletools.markobject)]
        while (value := stack.pop()) >= 0:
            depths.append(value)
    return depths + [stack.pop() for _ in before]
