"""Hidden names for what is being written or removed. A lock tells a live writer from one that was killed.

The kernel drops a lock with its process, so a number of a process that has come round, a container and, over
NFS, another host are told apart too.
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

_PREFIX: Final = ".unfinished-"
_REMOVED: Final = ".removed-"
_LOCK: Final = "writer"
_CONTENT: Final = "checkpoint"
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Give a name beside `path`, hidden, that nothing has yet; remove what is there in the end. `OSError`."""
    folder, lock = _claimed(path)
    try:
        yield folder / _CONTENT
    finally:
        try:
            _remove(folder)
        finally:
            os.close(lock)


def remove(path: Path) -> None:
    """Remove a file or a folder, which loses its name first: nobody finds half of it. `OSError`.

    Even a full disk has room for that.
    """
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    hidden = path.with_name(f"{_REMOVED}{path.name}-{uuid.uuid4().hex}")
    path.rename(hidden)
    _remove_tree(hidden)


def clear(folder: Path) -> list[tuple[Path, OSError]]:
    """Remove what writers that were killed have left in a folder; return what can't be removed, and why.

    What belongs to a writer that lives, to another user or to nobody stays, without a word.
    """
    try:
        found = sorted(path for path in folder.iterdir() if path.name.startswith((_PREFIX, _REMOVED)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [(folder, error)]
    troubles = []
    for left in found:
        try:
            if left.name.startswith(_REMOVED):
                _remove_tree(left)
            else:
                _clear(left)
        except PermissionError:
            continue  # another user's
        except OSError as error:
            troubles.append((left, error))
    return troubles


def _claimed(path: Path) -> tuple[Path, int]:
    """Make a folder, and lock it before anybody can take it for one that was left."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{path.name}-", dir=path.parent))
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # it was cleared, for it had no lock yet
        if _lock(lock, otherwise=True) and os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _clear(left: Path) -> None:
    try:
        lock = os.open(left / _LOCK, os.O_RDWR)
    except NotADirectoryError:
        return
    except FileNotFoundError:
        _remove_empty(left)
        return
    try:
        if _lock(lock, otherwise=False):
            _remove(left)
    finally:
        os.close(lock)


def _lock(descriptor: int, *, otherwise: bool) -> bool:
    """Lock a file unless somebody else has; `otherwise`, if the file system knows no locks."""
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
    """Remove a folder and its content; the lock goes last, so that what is left of it can be cleared."""
    content = folder / _CONTENT
    if content.is_dir():
        _remove_tree(content)
    else:
        content.unlink(missing_ok=True)
    (folder / _LOCK).unlink(missing_ok=True)
    _remove_empty(folder)


def _remove_tree(folder: Path) -> None:
    """Remove a folder that somebody else may be removing too."""
    while folder.is_dir():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _remove_empty(folder: Path) -> None:
    """Remove a folder that has no lock, unless something is in it; somebody else may be faster."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
