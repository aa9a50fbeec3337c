"""Writes checkpoints to disk atomically, and reads them back.

A checkpoint is written under a hidden name, flushed to the disk with its folder, and renamed. So an
interrupted or failed write, e.g. on a full disk, leaves the previous content unchanged.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch

from checkmate import state
from checkmate.consolidate import archives, unfinished
from checkmate.consolidate.chunks import Select, everything
from checkmate.rpc.protocol import PROTOCOL

Format = Literal["dcp", "torch", "torchtitan"]
"""PyTorch Distributed Checkpoint, a folder; one `torch.save` file; or a folder with torchtitan's keys."""

_MODE: Final = 0o600  # parameters may be secret
_FOLDER_MODE: Final = 0o700
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2  # of renameat2(2): there is a checkpoint at every moment


class DiskError(RuntimeError):
    """A checkpoint can't be written or read. The previous content is unchanged."""

    exit_code = 1


def save(checkpoint: Mapping[str, Any], path: Path, kind: Format, *, replace: bool = False) -> int:
    """Write a checkpoint atomically. Create the parent folder if necessary. Return the bytes of its files.

    Args:
        checkpoint: The result of `assemble.checkpoint`.
        path: The file or folder to write. An existing file is replaced.
        kind: The format.
        replace: Replace an existing folder too.

    Raises:
        DiskError: `path` is a folder that is not empty, or the disk is full or fails.
    """
    try:
        path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        if not replace:
            _check_free(path, kind)
        with unfinished.unfinished(path) as temporary:
            if kind == "torch":
                _save_file(checkpoint, temporary)
            else:
                _save_folder(checkpoint, temporary)
            files = temporary.iterdir() if temporary.is_dir() else [temporary]
            nbytes = sum(file.stat().st_size for file in files)
            _move_into_place(temporary, path)
        _sync(path.parent)
        return nbytes
    except (OSError, RuntimeError) as error:
        raise DiskError(f"can't write {path}: {error_reason(error)}") from None


def is_checkpoint(path: Path) -> bool:
    """Return whether a path looks like a checkpoint: a DCP folder, or a torch.save file."""
    if path.is_dir():
        return (path / unfinished.INDEX).is_file()
    return path.is_file() and path.suffix == ".pt"


def load(path: Path, select: Select = everything) -> dict[str, Any]:
    """Return a checkpoint like `assemble.checkpoint`'s, with parameters and ranks by number, on the CPU.

    `select` determines what to read of tensors; a file is read as a whole all the same.

    Raises:
        DiskError: It can't be read as a checkpoint.
    """
    try:
        checkpoint = _read(path, None, select)
        if "optimizer" in checkpoint and "model" not in checkpoint:
            raise ValueError("it has torchtitan's keys; consolidate with --format dcp writes what this reads")
        if "model" in checkpoint:
            return _check_protocol(_by_number(checkpoint))
        return {
            f"group{i}": _check_protocol(_by_number(checkpoint[f"group{i}"]))
            for i in range(max(len(checkpoint), 1))
        }
    except Exception as error:  # noqa: BLE001 - pickle and torch raise anything
        raise DiskError(f"can't read {path} as a checkpoint: {error_reason(error)}") from None


def _check_protocol(group: dict[str, Any]) -> dict[str, Any]:
    """Return a DP group's part of a checkpoint. Raise `ValueError` if a newer version has written it."""
    protocol = group.get("protocol", 0)  # versions without one wrote the same keys
    if type(protocol) is not int or not 0 <= protocol <= PROTOCOL:
        raise ValueError(
            f"it has format {protocol}, and this version of Checkmate reads up to {PROTOCOL}: this version "
            "is older than the one that wrote it; install that one"
        )
    return group


def read_run(path: Path) -> str | None:
    """Return a checkpoint's run without reading tensors, or `None` if it can't be read."""
    try:
        values = _read(path, {"run", "group0.run"})
        run = values.get("group0", values)["run"]
    except Exception:  # noqa: BLE001 - pickle and torch raise anything
        return None
    return run if isinstance(run, str) else None


def stage_in(checkpoint: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return one stage's part of a checkpoint. Raise `KeyError` if it lacks this stage."""
    if "model" in checkpoint and number == checkpoint["group"]:
        return dict(checkpoint)
    return dict(checkpoint[f"group{number}"])


def clear_unfinished(folder: Path) -> None:
    """Remove remains of killed writers from a folder; finally raise `DiskError` if some can't be removed."""
    troubles = unfinished.clear(folder)
    if troubles:
        raise DiskError(
            "; ".join(f"can't clear {remains}: {error_reason(error)}" for remains, error in troubles)
        )


def _check_free(path: Path, kind: Format) -> None:
    if path.is_dir() and (kind == "torch" or any(path.iterdir())):
        raise OSError("the folder exists already; specify another, or remove it")
    if path.exists() and not path.is_dir() and kind != "torch":
        raise OSError("a file of this name exists already; specify another, or remove it")


def _move_into_place(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`. If there was a folder, it is at `temporary` afterwards, to be removed."""
    if not path.is_dir() or not any(path.iterdir()):
        os.rename(temporary, path)
        return
    arguments = (_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE)
    if ctypes.CDLL(None, use_errno=True).renameat2(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}, when replacing a folder")


def _save_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "wb") as file:
        torch.save(dict(checkpoint), file)
    _sync(path)


def _save_folder(checkpoint: Mapping[str, Any], path: Path) -> None:
    path.mkdir(_FOLDER_MODE)  # nobody else reaches the files while PyTorch writes them
    from checkmate.consolidate import dcp_folder  # noqa: PLC0415 - DCP takes a tenth of a second

    dcp_folder.write(_without_copies(checkpoint), path)
    for file in (*path.iterdir(), path):
        file.chmod(_FOLDER_MODE if file == path else _MODE)
        _sync(file)


def _without_copies(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what `exact` has, too, and may be large."""
    if "exact" in checkpoint:
        return {key: value for key, value in checkpoint.items() if key != "extra"}
    return {
        key: _without_copies(stage) if isinstance(stage, dict) and "exact" in stage else stage
        for key, stage in checkpoint.items()
    }


def _read(path: Path, keys: set[str] | None = None, select: Select = everything) -> dict[str, Any]:
    """Read all or some keys, without running anything that is in the checkpoint."""
    if path.is_dir():
        from checkmate.consolidate import dcp_folder  # noqa: PLC0415 - as above

        return dcp_folder.read(path, keys, select)
    checkpoint: dict[str, Any] = archives.load(path, mapped=keys is not None)
    _select_parts(checkpoint, (), select)
    return checkpoint


def _select_parts(values: dict[Any, Any], path: tuple[object, ...], select: Select) -> None:
    """Replace tensors by what is selected of them."""
    for key, value in values.items():
        if isinstance(value, dict):
            _select_parts(value, (*path, key), select)
        elif isinstance(value, torch.Tensor) and (box := select((*path, key), value.shape)):
            values[key] = value[box.slices].clone()


def _by_number(group: Mapping[str, Any]) -> dict[str, Any]:
    """Undo DCP's changes: identify parameters and ranks by number, and restore empty dictionaries."""
    optimizer = {"state": {}, **group["optimizer"]}  # DCP drops empty dictionaries
    keys = [key for params in optimizer["param_groups"] for key in params["params"]]
    number = {key: index for index, key in enumerate(keys)}
    result = {
        **group,
        "optimizer": {
            "state": {number[key]: values for key, values in optimizer["state"].items()},
            "param_groups": [
                {**params, "params": [number[key] for key in params["params"]]}
                for params in optimizer["param_groups"]
            ],
        },
    }
    if "rank_buffers" in result:
        result["rank_buffers"] = {int(rank): value for rank, value in result["rank_buffers"].items()}
    result.setdefault("buffers", {})
    exact = result.pop("exact", None)
    if exact is None:
        return result
    # Protocols up to 6 had an archive of torch there.
    return {**result, **(archives.load(exact) if exact[:2] == b"PK" else state.loads(exact))}


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def error_reason(error: BaseException) -> str:
    """Return what went wrong, in one line. An error that is raised `from None` has the reason itself."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if isinstance(cause, OSError) and not isinstance(error, OSError):
        error = cause
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]
