"""The job that CHECKMATE_JOB names. It is read again only if one of its files has changed.

A job of thousands of ranks takes a second to read and check, and `shard_mesh`, `restore` and `protect` each
need it.
"""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from checkmate.job.files import JobError, read_set
from checkmate.job.schema import Job
from checkmate.job.yaml_lines import Document, read_document
from checkmate.training.errors import SessionError

JOB_VARIABLE: Final = "CHECKMATE_JOB"

_Stamp = tuple[int, ...] | None


class _Kept(NamedTuple):
    """A job, and how its files were just before they were read."""

    job: Job
    stamps: dict[Path, _Stamp]


_kept: dict[Path, _Kept] = {}
"""By the absolute path of the job file; the last one only."""


def named_job() -> Job:
    """Return the job that CHECKMATE_JOB names. Raise `SessionError` if there is none."""
    named = os.environ.get(JOB_VARIABLE)
    if not named:
        raise SessionError(f"{JOB_VARIABLE} is not set: set it to the path of the job's YAML")
    file = Path(named).absolute()  # so that paths in the job are, too
    kept = _kept.get(file)
    if kept is not None and all(stamp and stamp == _stamp(one) for one, stamp in kept.stamps.items()):
        return kept.job
    stamps: dict[Path, _Stamp] = {}

    @cache
    def read(one: Path) -> Document:
        stamps[one] = _stamp(one)
        return read_document(one)

    try:
        (job,) = read_set([file], read).require()
    except JobError as error:
        raise SessionError(f"{JOB_VARIABLE}: {error}") from None
    _kept.clear()
    _kept[file] = _Kept(job, stamps)
    return job


def _stamp(file: Path) -> _Stamp:
    """Return what changes if a file does; `None` if that is not known, as of a pipe."""
    try:
        found = file.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
