"""Checked jobs in the user's cache, so that trainers that start again need not check their job again.

To check a job of thousands of ranks takes a second, and what checks it as long to import as the rest of
Checkmate. A kept job is used only if each file that it was read from has the same contents, and if what would
check it is the same. Like Python's own compiled files, it is of the user alone; it can't name other classes
than those of a job.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final

from checkmate.cache import cache_folder
from checkmate.job import schema
from checkmate.job.schema import Job

JOBS_MOST: Final = 64
"""Jobs that are kept; the one that was kept longest ago goes first."""
_BYTES_MOST: Final = 64 << 20
_FOLDER: Final = "jobs"
_CLASSES: Final = {("ipaddress", "IPv4Address"), ("pathlib", "PosixPath")}
"""What a job contains beside the classes of `schema`."""


@dataclass(frozen=True)
class CheckedJob:
    """A job, and the files that it was read from with the `fingerprint` of each."""

    job: Job
    files: Mapping[Path, str | None]

    def is_current(self) -> bool:
        """Return whether all files are as they were."""
        return all(was is not None and fingerprint(file) == was for file, was in self.files.items())


def fingerprint(file: Path) -> str | None:
    """Return that of a file's contents; `None` for others than regular files: pipes are read only once."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    except (OSError, ValueError):
        return None


def read_kept(file: Path) -> CheckedJob | None:
    """Return the kept job of a job file, an absolute path; `None` if it must be read and checked."""
    try:
        content = _content(_place(file))
        head, _, rest = content.partition(b"\n")
        said: Any = json.loads(head)
        if said["checked_by"] != _checker():
            return None
        files = {Path(name): str(was) for name, was in said["files"].items()}
        job = _Unpickler(io.BytesIO(rest)).load()
        found = CheckedJob(job, files)
        return found if file in files and isinstance(job, Job) and found.is_current() else None
    except Exception:  # noqa: BLE001 - what is wrong with a cache's content is endless, and the job's file is there
        return None


def keep(file: Path, checked: CheckedJob) -> bool:
    """Keep a job, and return whether that was possible: a cache that can't be used is not an error."""
    if None in checked.files.values():
        return False
    said = {"checked_by": _checker(), "files": {str(one): was for one, was in checked.files.items()}}
    head = json.dumps(said).encode() + b"\n"
    try:
        place = _place(file)
        if _begins(place, head):  # a process that shares this home was first
            return True
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _replacing(place) as opened:
            opened.write(head + pickle.dumps(checked.job, protocol=5))
        _remove_oldest(place.parent)
    except OSError:
        return False
    return True


def _place(file: Path) -> Path:
    """Return where the job of a file is kept."""
    return cache_folder() / _FOLDER / f"{hashlib.sha256(os.fsencode(file)).hexdigest()[:32]}.job"


def _begins(place: Path, head: bytes) -> bool:
    """Return whether a kept file of this user begins so."""
    try:
        return _content(place, len(head)) == head
    except OSError:
        return False


def _content(place: Path, most: int = _BYTES_MOST) -> bytes:
    """Return a kept file's content. Raise `OSError` unless it is this user's, who alone can write to it."""
    with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        about = os.fstat(opened.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise PermissionError(f"{place} is not this user's alone")
        return opened.read(most)


@contextmanager
def _replacing(place: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which takes a file's place if all goes well."""
    number, name = tempfile.mkstemp(dir=place.parent)
    try:
        with open(number, "wb") as opened:
            yield opened
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise


def _remove_oldest(folder: Path) -> None:
    files = [one for one in os.scandir(folder) if one.is_file(follow_symlinks=False)]
    for one in sorted(files, key=lambda one: one.stat().st_mtime)[:-JOBS_MOST]:
        Path(one.path).unlink(missing_ok=True)


class _Unpickler(pickle.Unpickler):
    """Makes objects of a job's classes only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of a job. Raise `UnpicklingError` for anything else."""
        own = module == schema.__name__ and isinstance(getattr(schema, name, None), type)
        if own or (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not of a job")


@cache
def _checker() -> str:
    """Return what is the same as long as the same version of this package would check a job."""
    found = sorted(_sources(os.path.dirname(__file__)))
    return hashlib.sha256(repr((sys.version, found)).encode()).hexdigest()


def _sources(folder: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, size and time of each source file."""
    for one in os.scandir(folder):
        if one.is_dir(follow_symlinks=False):
            yield from _sources(one.path)
        elif one.name.endswith(".py"):
            about = one.stat()
            yield one.path, about.st_size, about.st_mtime_ns
