"""Private files and folders: read only if nobody else can, and written whole or not at all.

Whatever the umask, no file and no folder has a wider mode than 0600 or 0700 at any moment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from checkmate.base.opening import at_once
from checkmate.keys.errors import KeysError

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700

_UNFINISHED: Final = ".unfinished-"
_MAX_BYTES: Final = 1 << 20
_NO_LOCKS: Final = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def read_private(file: Path, forbidden: int = 0o077) -> bytes | None:
    """Return a file's content, or `None` if it does not exist. `forbidden`: bits that its mode may not have.

    Raises:
        KeysError: It can't be read, is not a file, is larger than 1 MiB, or others have access to it.
    """
    try:
        descriptor = at_once(str(file), os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeysError(f"can't read {file}: {error.strerror}") from None
    try:
        _check_private(file, os.fstat(descriptor), forbidden)
        return os.read(descriptor, _MAX_BYTES)
    except OSError as error:
        raise KeysError(f"can't read {file}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _check_private(file: Path, status: os.stat_result, forbidden: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeysError(f"can't read {file}: it is not a file")
    if status.st_mode & forbidden:
        raise KeysError(
            f"{file} has mode {stat.S_IMODE(status.st_mode):04o}, so others than its owner have access; "
            f"correct it with: chmod 600 {file}"
        )
    if status.st_size > _MAX_BYTES:
        raise KeysError(f"{file} is larger than 1 MiB; it is not a key or a certificate")


def check_folder(folder: Path) -> None:
    """Raise `KeysError` if others than its owner could replace a folder's files."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        raise KeysError(
            f"{folder} has mode {mode:04o}, so others than its owner could replace its files; "
            f"correct it with: chmod 700 {folder}"
        )


@contextlib.contextmanager
def workspace(keys: Path) -> Iterator[Path]:
    """Yield an empty hidden folder in `keys`, and remove it with its content at the end.

    Create `keys` if necessary, and remove it at the end if it is still empty. Remove what killed processes
    have left. May raise `OSError`.
    """
    with contextlib.ExitStack() as undo:
        try:
            _make_folder(keys)
            undo.callback(_remove_if_empty, keys)
        except FileExistsError:
            if not keys.is_dir():
                raise
        lock = os.open(keys, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, lock)
        if _lock(lock):
            for remains in keys.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(remains)
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=keys)))
        folder.chmod(FOLDER_MODE)  # the umask may have taken rights away
        yield folder


def put_tree(work: Path, target: Path, files: Mapping[str, bytes]) -> None:
    """Create a folder of files and folders, whole or not at all.

    Args:
        work: The result of `workspace`, on the same file system.
        target: The folder. It does not exist yet, or is empty.
        files: The contents, by path relative to `target`, with at most one folder in the path.

    Raises:
        OSError: Also if `target` is not empty.
    """
    root = work / "tree"
    _make_folder(root)
    folders = [
        root,
        *(root / name for name in dict.fromkeys(os.path.dirname(path) for path in files) if name),
    ]
    for folder in folders[1:]:
        _make_folder(folder)
    for path, content in files.items():
        _write(root / path, content)
    for folder in reversed(folders):
        _sync_folder(folder)
    root.rename(target)
    _sync_folder(target.parent)


def put_file(work: Path, target: Path, content: bytes) -> None:
    """Write or replace a file, whole or not at all. `work`: as for `put_tree`. May raise `OSError`."""
    file = work / "file"
    _write(file, content)
    file.replace(target)
    _sync_folder(target.parent)


def remove_file(file: Path) -> None:
    """Remove a file if it exists. May raise `OSError`."""
    file.unlink(missing_ok=True)
    _sync_folder(file.parent)


def _make_folder(folder: Path) -> None:
    folder.mkdir(FOLDER_MODE)
    folder.chmod(FOLDER_MODE)


def _write(file: Path, content: bytes) -> None:
    """Create a file. Its mode is right before it has content."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with open(descriptor, "wb") as stream:
        os.fchmod(descriptor, FILE_MODE)
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a folder against other processes that make keys. Return `False` if it has no locks (NFS)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
