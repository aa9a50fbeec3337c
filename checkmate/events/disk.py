"""The two files of an event log on disk."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from checkmate.events.reading import OLDER, SUFFIX, EventsError

_log: Final = logging.getLogger("checkmate")


class Disk:
    """Two files, of which the newer one is appended to. All but the first opening is the thread's."""

    def __init__(self, path: Path, file_bytes: int) -> None:
        self._path, self._most = path, file_bytes
        self.files = (path.with_name(path.name.removesuffix(SUFFIX) + OLDER), path)
        """The older one first."""
        self._file = -1
        self._size = 0
        self._whole = True  # the last byte is the end of a line
        self._told = False
        self._lock_file = self._folder = -1
        try:
            self._open()
        except OSError as error:
            if not _passes(error):
                self.close()
                why = error.strerror or str(error)
                if path.parent.exists() and not path.parent.is_dir():
                    path, why = path.parent, "it is not a folder"
                raise EventsError(f"events can't be kept in {path}: {why}") from None
            self._trouble(error)

    def write(self, lines: list[str]) -> int:
        """Append lines. Return how many are in the file; log the first failure of several."""
        written = 0
        try:
            for line in lines:
                self._append(f"{line}\n".encode())
                written += 1
            os.fdatasync(self._file)
        except (OSError, EventsError) as error:
            self._trouble(error)
        else:
            self._told = False
        return written

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._lock_file, self._folder):
            if file >= 0:
                os.close(file)
        self._file = self._lock_file = self._folder = -1

    def _append(self, data: bytes) -> None:
        if self._file < 0:
            self._open()
        if self._size and self._size + len(data) > self._most:
            self._rotate()
        if not self._whole:
            data = b"\n" + data
        written = os.write(self._file, data)
        self._size += written
        self._whole = written == len(data)
        if not self._whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rotate(self) -> None:
        """Begin a file. Whatever fails, the next write opens again."""
        os.close(self._file)
        self._file = -1
        with suppress(FileNotFoundError):  # somebody has moved it
            names = (self._path.name, self.files[0].name)
            os.replace(*names, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._open()

    def _open(self) -> None:
        """Open the newer file, in a folder that this process has locked, each of which is made if need be."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open_folder()
        self._lock()
        self._file = _opened(self._path.name, self._folder, os.O_APPEND)
        self._size = os.fstat(self._file).st_size
        # A process that was killed may have left half a line.
        self._whole = not self._size or os.pread(self._file, 1, self._size - 1) == b"\n"

    def _open_folder(self) -> None:
        """Open the folder again, which may have been moved away.

        Where another user can change its path, as root's in that user's home, no link is followed.
        """
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = folder
        if os.readlink(f"/proc/self/fd/{folder}") != str(_place_of(self._path.parent)):
            raise PermissionError(errno.EPERM, "a link of another user leads elsewhere")

    def _lock(self) -> None:
        """Lock the log, also if its folder was moved away with the lock."""
        path = self._path.with_name(f".{self._path.name}.lock")
        if self._lock_file >= 0 and path.exists():
            return
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        self._lock_file = _locked(path, self._folder)

    def _trouble(self, error: OSError | EventsError) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "events are not kept in %s for now: %s; this process goes on",
                self._path,
                (error.strerror if isinstance(error, OSError) else None) or error,
            )


def _opened(name: str, folder: int, flags: int = 0) -> int:
    """Open a file of the folder, made if need be. Raise `OSError` for links, pipes and second names."""
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, 0o600, dir_fd=folder)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(file)
        raise PermissionError(errno.EPERM, "it is not a file of its own")
    return file


def _place_of(folder: Path) -> Path:
    """Return where a path leads if no link is followed that another user than root can have made."""
    own = {0, os.geteuid()}
    place, trusted = Path("/"), True
    for part in Path(os.path.abspath(folder)).parts[1:]:
        trusted = trusted and place.lstat().st_uid in own
        place /= part
        if trusted and place.is_symlink() and place.lstat().st_uid in own:
            place = Path(os.path.realpath(place))
    return place


def _locked(path: Path, folder: int) -> int:
    """Return a file that this process alone has locked. Raise `EventsError` if another one has."""
    file = _opened(path.name, folder)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise  # a file system without locks
        log = path.name.removeprefix(".").removesuffix(".lock")
        raise EventsError(
            f"another process keeps the events of {path.parent / log}; specify another folder for this one"
        ) from None
    return file


def _passes(error: OSError) -> bool:
    """Return whether a failure may pass, such as a full disk, or one that is read-only after an error."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.ENOLCK)
