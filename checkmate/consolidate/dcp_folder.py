"""Writes a folder of PyTorch Distributed Checkpoint, and reads it without running what is in it.

PyTorch unpickles the folder's index and its values that are not tensors, which may run code. Here the index
is read with the few classes that PyTorch itself writes there, and values as tensors and plain values only.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint import (
    default_planner,
    filesystem,
    planner_helpers,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from checkmate import state
from checkmate.base.opening import open_file
from checkmate.consolidate import archives, unfinished
from checkmate.consolidate.chunks import Box, Select, everything

MAX_INDEX: Final = 256 << 20
"""Bytes of an index."""


class FolderError(ValueError):
    """A folder's index is not one that PyTorch writes."""


class _Sealed(type):
    """A class in place of PyTorch's own, whose attributes an index could replace for the whole process."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise FolderError(f"its index changes {cls.__name__}, which no checkpoint needs")


def _sealed(kind: type) -> _Sealed:
    """Return a class whose new objects are of class `kind`."""
    attributes = {"__slots__": (), "__new__": lambda _, *args: object.__new__(kind)}
    return _Sealed(kind.__name__, (), attributes)


class _Call:
    """A function whose attributes an index cannot replace."""

    __slots__ = ("_function",)
    _function: Callable[..., object]

    def __init__(self, function: Callable[..., object]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise FolderError("its index changes a function, which no checkpoint needs")

    def __call__(self, *args: Any) -> object:
        return self._function(*args)


class _Member:
    """A member of an enumeration, whose attributes an index cannot replace."""

    __slots__ = ("_member",)
    _member: object

    def __init__(self, member: object) -> None:
        object.__setattr__(self, "_member", member)

    def __setattr__(self, name: str, value: object) -> None:
        raise FolderError("its index changes an enumeration, which no checkpoint needs")

    def __eq__(self, other: object) -> bool:
        return self._member is other

    __hash__ = None  # type: ignore[assignment]


_MEMORY_FORMATS: Final = _Call(lambda number: _Member(meta._MEM_FORMAT_ENCODING(number)))


def _joined(*parts: str) -> str:
    """Return the folder's place when it was written; Python 3.13 alone names `pathlib._local`."""
    return "/".join(parts)


def _memory_format(owner: object, name: str) -> object:
    """Return a member of the one enumeration in an index; Python 3.11.0 to 3.11.3 pickle it as `getattr`."""
    if owner is not _MEMORY_FORMATS:
        raise FolderError("its index refers to builtins.getattr, which no checkpoint needs")
    return _Member(meta._MEM_FORMAT_ENCODING[name])


_CLASSES: Final[dict[tuple[str, str], object]] = {
    **{
        (kind.__module__, kind.__qualname__): _sealed(kind)
        for kind in (
            meta.BytesStorageMetadata,
            meta.ChunkStorageMetadata,
            meta.Metadata,
            meta.MetadataIndex,
            meta.StorageMeta,
            meta.TensorProperties,
            meta.TensorStorageMetadata,
            filesystem._StorageInfo,
        )
    },
    (meta._MEM_FORMAT_ENCODING.__module__, meta._MEM_FORMAT_ENCODING.__qualname__): _MEMORY_FORMATS,
    ("torch", "Size"): torch.Size,
    **{(module, "PosixPath"): _Call(_joined) for module in ("pathlib", "pathlib._local")},
    ("builtins", "getattr"): _Call(_memory_format),
    ("torch.serialization", "_get_layout"): _Call(lambda name: torch.strided),
    **{
        ("torch", state.dtype_name(dtype)): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    },
}
"""The classes and functions to which an index of PyTorch refers."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise FolderError(f"its index refers to {module}.{name}, which no checkpoint needs") from None


class _Files(filesystem.FileSystem):
    """Files that may have become pipes since their sizes were compared with the index."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "rb"
        with open_file(Path(path)) as stream:
            yield cast(io.IOBase, stream)


class _Reader(filesystem.FileSystemReader):
    """A reader with an index that has been checked."""

    def __init__(self, folder: Path, index: meta.Metadata) -> None:
        super().__init__(folder)
        self.fs = _Files()
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> meta.Metadata:
        return self._index


class _Planner(default_planner._EmptyStateDictLoadPlanner):
    """A planner that reads values without running code, and of tensors only what is selected."""

    def __init__(self, keys: set[str] | None, select: Select) -> None:
        super().__init__(keys)  # type: ignore[no-untyped-call]
        self._select = select
        self._boxes: dict[str, tuple[Box, meta.TensorStorageMetadata]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: meta.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        places = metadata.planner_data or {}
        for name, value in metadata.state_dict_metadata.items():
            if not self._should_include_key(name, metadata):
                continue
            path = places.get(name, (name,))
            if isinstance(value, meta.TensorStorageMetadata):
                set_element(state_dict, path, self._room(name, path, value))
            else:
                set_element(state_dict, path, value)
        default_planner.DefaultLoadPlanner.set_up_planner(self, state_dict, metadata, is_coordinator)

    def _room(
        self, name: str, path: Sequence[object], stored_tensor: meta.TensorStorageMetadata
    ) -> torch.Tensor:
        """Return an empty tensor for what is selected of a stored one."""
        box = self._select(path, stored_tensor.size)
        if box is not None:
            self._boxes[name] = (box, stored_tensor)
        return torch.empty(
            stored_tensor.size if box is None else box.shape, dtype=stored_tensor.properties.dtype
        )

    def create_local_plan(self) -> LoadPlan:
        if not self._boxes:
            return super().create_local_plan()
        assert self.metadata is not None
        unselected = {name: value for name, value in self.state_dict.items() if name not in self._boxes}
        items = default_planner.create_default_local_load_plan(unselected, self.metadata).items
        for name, (box, stored_tensor) in self._boxes.items():
            chunk = meta.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            items += planner_helpers.create_read_items_for_chunk_list(name, stored_tensor, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: meta.MetadataIndex) -> torch.Tensor:
        if index.fqn not in self._boxes:
            return super().lookup_tensor(index)
        tensor: torch.Tensor = self.state_dict[index.fqn]
        return tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        mapping = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, mapping, archives.load(value.getvalue()))


def write(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint into an empty folder. Raise `OSError` or `RuntimeError` if that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing process group
        writer = filesystem.FileSystemWriter(path, sync_files=True)
        _unwrapped(partial(state_dict_saver.save, dict(checkpoint), storage_writer=writer, no_dist=True))


def _unwrapped(do: Callable[[], object]) -> None:
    """Raise the exception that DCP has wrapped in its own, which is not one that callers expect."""
    try:
        do()
        return
    except CheckpointException as error:
        inner, _ = next(iter(error.failures.values()))
    # Raised here, it keeps its own context, which may have the reason.
    raise inner if isinstance(inner, OSError | RuntimeError | ValueError) else RuntimeError(inner)


def read(folder: Path, keys: set[str] | None = None, select: Select = everything) -> dict[str, Any]:
    """Return all or some values of a folder, like PyTorch's `dcp_to_torch_save`; of tensors what is selected.

    Raises:
        FolderError: Its index is not one that PyTorch writes, or does not fit its files.
        StateError: A value is not plain.
        OSError: A file can't be read.
        RuntimeError: PyTorch can't read it.
    """
    values: dict[str, Any] = {}
    planner = _Planner(keys, select)
    reader = _Reader(folder, read_index(folder))
    load = state_dict_loader._load_state_dict
    _unwrapped(partial(load, values, storage_reader=reader, planner=planner, no_dist=True))
    return values


def read_index(folder: Path) -> meta.Metadata:
    """Return a folder's index. Raise `FolderError` if it is not one that PyTorch writes, or lies."""
    path = folder / unfinished.INDEX
    try:
        with open_file(path) as file:
            data = file.read(MAX_INDEX + 1)
    except OSError as error:
        raise FolderError(f"its index can't be opened: {error.strerror}") from None
    if len(data) > MAX_INDEX:
        raise FolderError(f"its index has more than the {MAX_INDEX} bytes that it may have")
    try:
        archives.check_nesting(data)
        index: meta.Metadata = _Unpickler(io.BytesIO(data)).load()
    except FolderError:
        raise
    except Exception as error:  # noqa: BLE001 - pickle raises anything
        raise FolderError(f"its index cannot be read: {error}") from None
    try:
        _check(index, {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()})
    except (AttributeError, KeyError, TypeError) as error:
        raise FolderError(f"its index is incomplete: {error}") from None
    index.storage_meta = meta.StorageMeta()
    return index


def _check(index: Any, files: dict[str, int]) -> None:
    """Refuse an index whose tensors are larger than the files, or that refers to other files."""
    if not isinstance(index, meta.Metadata):
        raise FolderError(f"its index is a {type(index).__name__}")
    length = 0
    for place in index.storage_data.values():
        if not isinstance(place.relative_path, str) or {type(place.offset), type(place.length)} != {int}:
            raise FolderError("its index has places that are not bytes of a file")
        file_size = files.get(place.relative_path)
        if file_size is None or not 0 <= place.offset <= place.offset + place.length <= file_size:
            raise FolderError(
                f"its index refers to bytes {place.offset} to {place.offset + place.length} of "
                f"{place.relative_path[:100]}, which the folder does not have"
            )
        length += place.length
    if length > sum(files.values()):
        raise FolderError(f"its index refers to {length} bytes, its files have {sum(files.values())}")
    nbytes = 0
    for name, value in index.state_dict_metadata.items():
        if not isinstance(value, meta.TensorStorageMetadata):
            continue
        if not all(type(size) is int and size >= 0 for size in value.size):
            raise FolderError(f"{str(name)[:100]} has a shape that is not one")
        nbytes += math.prod(value.size) * value.properties.dtype.itemsize
    if nbytes > sum(files.values()):
        raise FolderError(f"its index has {nbytes} bytes of tensors, its files have {sum(files.values())}")
