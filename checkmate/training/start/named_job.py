"""The job that CHECKMATE_JOB names. It is read again only if one of its files has changed.

A job of thousands of ranks takes a second to read and check, and `shard_mesh`, `restore` and `protect` each
need it. So does each start: a job that was checked before is taken from the user's cache.
"""

from __future__ import annotations

import os
from pathlib import Path

from checkmate.job.kept import CheckedJob, keep, read_kept
from checkmate.job.schema import JOB_VARIABLE, Job
from checkmate.training.errors import SessionError

_known: dict[Path, CheckedJob] = {}
"""By the absolute path of the job file; the last one only."""


def named_job() -> Job:
    """Return the job that CHECKMATE_JOB names. Raise `SessionError` if there is none."""
    named = os.environ.get(JOB_VARIABLE)
    if not named:
        raise SessionError(f"{JOB_VARIABLE} is not set: set it to the path of the job's YAML")
    file = Path(named).absolute()  # so that paths in the job are absolute, too
    known = _known.get(file)
    if known is None or not known.is_current():
        known = read_kept(file) or _read(file)
        _known.clear()
        _known[file] = known
    return known.job


def _read(file: Path) -> CheckedJob:
    """Read, check and keep a job."""
    from checkmate.job.files import JobError, read_checked  # noqa: PLC0415 - takes as long as all the rest

    try:
        checked = read_checked(file)
    except JobError as error:
        raise SessionError(f"{JOB_VARIABLE}: {error}") from None
    if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun's: one process of a host is enough
        keep(file, checked)
    return checked
