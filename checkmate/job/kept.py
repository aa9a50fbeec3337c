"""Checked jobs in the user's cache, so that trainers that start again need not check their job again.

To check a job of thousands of ranks takes a second, and what checks it takes as long to import as the rest of
Checkmate. A kept job is used only if each file that it was read from has the same contents, and if the same
code would check it. Only the user can write to it, as to Python's own compiled files.

In JSON, each object has one key, which says what its value is: `{"Stub": [{"ip": 167772161}, "02:...",
7010]}` has the values of a stub's fields, in order. Nothing else than what a job consists of can be made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from importlib.util import find_spec
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from checkmate.base.cache import WRITTEN_BY_OTHERS, cache_folder
from checkmate.job import schema
from checkmate.job.fields import FILE_BYTES
from checkmate.job.schema import Frozen, Job

JOBS_MOST: Final = 64
"""Jobs that are kept; the one that was kept longest ago goes first."""
_BYTES_MOST: Final = 64 << 20
_FOLDER: Final = "jobs"
_CACHED: Final = re.compile(r"[0-9a-f]{32}\.job")
_PART: Final = re.compile(r"[0-9a-f]{16}\.part")
"""The name of a file that is being written."""
_ABANDONED_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class CheckedJob:
    """A job, and the files that it was read from with the `fingerprint` of each."""

    job: Job
    files: Mapping[Path, str | None]

    def is_current(self) -> bool:
        """Return whether all files are as they were."""
        return all(was is not None and fingerprint(file) == was for file, was in self.files.items())


def fingerprint(file: Path) -> str | None:
    """Return a file's, as in `Document`; `None` if it is not a regular file, too large, or can't be read."""
    try:
        if not file.is_file():
            return None
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES + 1)
    except (OSError, ValueError):
        return None
    return hashlib.sha256(content).hexdigest() if len(content) <= FILE_BYTES else None


def read_kept(file: Path) -> CheckedJob | None:
    """Return the kept job of a job file, an absolute path; `None` if it must be read and checked."""
    try:
        with _folder() as folder:
            head, _, body = _content(folder, _name(file)).partition(b"\n")
        head_values = json.loads(head)
        files = {Path(name): str(was) for name, was in head_values["files"].items()}
        if file not in files or head_values["job"] != hashlib.sha256(body).hexdigest():
            return None
        checked = CheckedJob(of_json(body), files)
        return checked if checked.is_current() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, of another, or damaged
        return None


def keep(file: Path, checked: CheckedJob) -> bool:
    """Keep a job, and return whether that was possible: a cache that can't be used is not an error."""
    if None in checked.files.values():
        return False
    body = to_json(checked.job).encode()
    head = {
        "files": {str(file_read): was for file_read, was in checked.files.items()},
        "job": hashlib.sha256(body).hexdigest(),
    }
    content = json.dumps(head).encode() + b"\n" + body
    try:
        (cache_folder() / _FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        with _folder() as folder:
            name = _name(file)
            _remove_abandoned(folder)
            if not _has(folder, name, content):  # else a process that shares this home was first
                _write_file(folder, name, content)
                _remove_oldest(folder, name)
    except OSError:
        return False
    return True


def _name(file: Path) -> str:
    """Return the name under which a file's job is kept by this version. Raise `OSError`."""
    return f"{hashlib.sha256(os.fsencode(file) + checked_by(Path(__file__).parents[1])).hexdigest()[:32]}.job"


@contextmanager
def _folder() -> Iterator[int]:
    """Yield the open folder. Raise `OSError` unless it is this user's, and nobody else can write to it."""
    number = os.open(cache_folder() / _FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_own(number)
        yield number
    finally:
        os.close(number)


def _check_own(number: int) -> os.stat_result:
    about = os.fstat(number)
    if about.st_uid != os.geteuid() or about.st_mode & WRITTEN_BY_OTHERS:
        raise PermissionError("others can write to it")
    return about


def _content(folder: int, name: str) -> bytes:
    """Return a kept file's content. Raise `OSError` unless it is a file of this user's alone."""
    number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        if not stat.S_ISREG(_check_own(number).st_mode):
            raise OSError(f"{name} is not a file")
        with open(number, "rb", closefd=False) as stream:
            return stream.read(_BYTES_MOST)
    finally:
        os.close(number)


def _has(folder: int, name: str, content: bytes) -> bool:
    try:
        return _content(folder, name) == content
    except OSError:
        return False


def _write_file(folder: int, name: str, content: bytes) -> None:
    """Write a file whole, in the place of one with its name."""
    part = f"{os.urandom(8).hex()}.part"
    number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        with open(number, "wb") as stream:
            stream.write(content)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):  # else it would take the place of an interrupt
            os.unlink(part, dir_fd=folder)
        raise


def _remove_abandoned(folder: int) -> None:
    """Remove what processes that were killed have left."""
    now = time.time()
    for name, at in _write_times(folder, _PART):
        if abs(now - at) > _ABANDONED_SECONDS:
            _remove(folder, name)


def _remove_oldest(folder: int, newest: str) -> None:
    """Remove kept jobs that are too many, but not the `newest`, whatever the clock says."""
    older = [(at, name) for name, at in _write_times(folder, _CACHED) if name != newest]
    for _, name in sorted(older)[: max(len(older) - JOBS_MOST + 1, 0)]:
        _remove(folder, name)


def _write_times(folder: int, names: re.Pattern[str]) -> Iterator[tuple[str, float]]:
    """Yield files by name, and when each was written."""
    for name in filter(names.fullmatch, os.listdir(folder)):
        with suppress(FileNotFoundError):  # another process was first
            yield name, os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime


def _remove(folder: int, name: str) -> None:
    with suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=folder)


@cache
def checked_by(package: Path) -> bytes:
    """Return what is the same as long as the same code would check a job. Raise `OSError` without sources.

    `package`: the folder of `checkmate`, with its source files.
    """
    digest = hashlib.sha256(sys.version.encode())
    required = [package / "base" / "wording.py", package / "job" / "checks.py", package / "wire" / "tag.py"]
    libraries = [_library("pydantic") / "version.py", _library("yaml") / "__init__.py"]
    sources = {*package.glob("job/**/*.py"), *package.glob("wire/*.py")}
    optional = sorted(file for file in sources - set(required) if file.is_file())  # an editor's lock is not
    for source in [*required, *libraries, *optional]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.digest()


def _library(name: str) -> Path:
    """Return a library's folder without its import. Raise `OSError` if there is none."""
    try:
        spec = find_spec(name)
    except ValueError:  # of a module without a spec, as some tools make that pack programs
        spec = None
    if spec is None or spec.origin is None:
        raise FileNotFoundError(name)
    return Path(spec.origin).parent


def to_json(job: Job) -> str:
    """Return a job as JSON."""
    return json.dumps(_plain(job), separators=(",", ":"))


def of_json(text: str | bytes) -> Job:
    """Return the job of `to_json`. Raise `ValueError` if it is something else."""
    try:
        job = json.loads(text, object_hook=_part_of)
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a job: {error!r}") from None
    if not isinstance(job, Job):
        raise ValueError("not a job")
    return job


def _plain(value: Any) -> Any:
    match value:
        case IPv4Address():
            return {"ip": int(value)}
        case Path():
            return {"path": str(value)}
        case tuple():
            return {"tuple": [_plain(item) for item in value]}
        case Mapping():
            return {"map": [[key, _plain(item)] for key, item in value.items()]}
        case Frozen():
            return {type(value).__name__: [_plain(getattr(value, name)) for name in _NAMES[type(value)]]}
        case _:
            return value


def _object(kind: type, values: Any) -> Any:
    """Return an object of a part of a file, without its constructor, which would be slower."""
    part: Any = object.__new__(kind)
    part.__dict__.update(zip(_NAMES[kind], values, strict=True))
    return part


def _part_of(pair: Any) -> Any:
    ((kind, value),) = pair.items()
    return _MAKERS[kind](value)


_PARTS: Final = [
    member for member in vars(schema).values() if is_dataclass(member) and isinstance(member, type)
]
_NAMES: Final[Mapping[type, list[str]]] = {kind: [member.name for member in fields(kind)] for kind in _PARTS}
_MAKERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "ip": IPv4Address,
    "map": dict,
    "path": Path,
    "tuple": tuple,
    **{kind.__name__: partial(_object, kind) for kind in _PARTS},
}
