"""The job that CHECKMATE_JOB names. It is read again only if one of its files has changed.

A job of thousands of ranks takes a second to read and check, and `shard_mesh`, `restore` and `protect` each
need it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from checkmate.job.files import JobError, read_job
from checkmate.job.following import JobFiles
from checkmate.job.schema import Job
from checkmate.training.errors import SessionError

JOB_VARIABLE: Final = "CHECKMATE_JOB"


class _Kept(NamedTuple):
    """A job, and its files, which tell whether they have changed since."""

    job: Job
    files: JobFiles


_kept: dict[Path, _Kept] = {}
"""By the absolute path of the job file; the last one only."""


def named_job() -> Job:
    """Return the job that CHECKMATE_JOB names. Raise `SessionError` if there is none."""
    named = os.environ.get(JOB_VARIABLE)
    if not named:
        raise SessionError(f"{JOB_VARIABLE} is not set: set it to the path of the job's YAML")
    file = Path(named).absolute()  # so that paths in the job are, too
    kept = _kept.get(file)
    if kept is not None and not kept.files.changed():
        return kept.job
    try:
        if file.is_dir():
            return read_job(file)  # which says that it must be a file
        files = JobFiles([file])
        (job,) = files.read().require()
    except JobError as error:
        raise SessionError(f"{JOB_VARIABLE}: {error}") from None
    _kept.clear()
    _kept[file] = _Kept(job, files)
    return job
