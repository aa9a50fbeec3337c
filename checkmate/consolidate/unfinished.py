"""Hidden names for files being written or removed, and locks that distinguish live writers from killed ones.

The kernel releases a lock when its process ends. Unlike process numbers, locks are reliable if numbers are
reused, in containers and, over NFS, on other hosts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

INDEX: Final = ".metadata"
"""The file of a folder of PyTorch Distributed Checkpoint that is written last."""

_UNFINISHED_PREFIX: Final = ".unfinished-"
_REMOVAL_PREFIX: Final = ".removed-"
_LOCK: Final = "writer"
_CONTENT: Final = "checkpoint"
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yield an unused hidden path beside `path`; remove its content at the end. May raise `OSError`."""
    folder, lock = _claim(path)
    try:
        yield folder / _CONTENT
    finally:
        try:
            _remove(folder)
        finally:
            os.close(lock)


def remove(path: Path) -> None:
    """Remove a file or a folder. A folder is hidden first, so that it is never visible in part.

    This works even on a full disk. May raise `OSError`.
    """
    if path.is_dir():
        path = path.rename(path.with_name(f"{_REMOVAL_PREFIX}{path.name}-{uuid.uuid4().hex}"))
    _delete(path)


def clear(folder: Path) -> list[tuple[Path, OSError]]:
    """Remove remains of killed writers from a folder; return those that can't be removed, and why.

    Remains of live writers and other users, and other files, are left alone silently.
    """
    try:
        paths = sorted(
            path for path in folder.iterdir() if path.name.startswith((_UNFINISHED_PREFIX, _REMOVAL_PREFIX))
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [(folder, error)]
    troubles = []
    for remains in paths:
        try:
            if remains.name.startswith(_REMOVAL_PREFIX):
                _delete(remains)
            else:
                _clear(remains)
        except PermissionError:
            continue  # it belongs to another user
        except OSError as error:
            troubles.append((remains, error))
    return troubles


def _claim(path: Path) -> tuple[Path, int]:
    """Create a folder and lock it; retry if another process has cleared it before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED_PREFIX}{path.name}-", dir=path.parent))
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # another process has cleared it
        if _lock(lock, otherwise=True) and os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _clear(remains: Path) -> None:
    try:
        lock = os.open(remains / _LOCK, os.O_RDWR)
    except NotADirectoryError:
        return
    except FileNotFoundError:
        _remove_empty(remains)
        return
    try:
        if _lock(lock, otherwise=False):
            _remove(remains)
    finally:
        os.close(lock)


def _lock(descriptor: int, *, otherwise: bool) -> bool:
    """Lock a file unless it is locked; return `otherwise` if the file system does not support locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return otherwise
        raise
    return True


def _remove(folder: Path) -> None:
    """Remove a folder and its content. The lock is removed last, so that `clear` can remove the rest."""
    _delete(folder / _CONTENT)
    (folder / _LOCK).unlink(missing_ok=True)
    _remove_empty(folder)


def _delete(path: Path) -> None:
    """Delete a file, or a folder in parts. Another process may be deleting it too."""
    while path.is_dir():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    """Remove a folder without a lock if it is empty. Another process may have removed it already."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise
