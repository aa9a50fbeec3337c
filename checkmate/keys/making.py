"""Making the keys of jobs on disk, and completing or renewing them later."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from checkmate.job.schema import Job
from checkmate.keys import disk
from checkmate.keys.errors import KeysError
from checkmate.keys.plans import AUTHORITY, JobKeys, plan_keys
from checkmate.keys.roles import CERT_FILE, KEY_FILE


def make_keys(jobs: Sequence[tuple[Job, Path]], now: dt.datetime) -> list[JobKeys]:
    """Make what is missing of the keys of jobs; issue certificates again that end soon or lack a host.

    All is planned and checked before anything is written. Each file, and each new folder, is written whole or
    not at all, so another run can complete what an interrupted one has begun.

    Args:
        jobs: Jobs, and the folder of keys for each. A job's own folder in it has the job's name.
        now: The time of issue, with a time zone.

    Raises:
        KeysError: Keys that are there are not as they should be, or the disk fails.
    """
    folders = {keys: Path(os.path.realpath(keys)) for _, keys in jobs}  # a folder must not be locked twice
    try:
        with ExitStack() as stack:
            # In order, so that two processes do not wait for each other.
            works = {
                keys: stack.enter_context(disk.workspace(keys)) for keys in sorted(set(folders.values()))
            }
            plans = [(plan_keys(job, keys / job.job, now), works[folders[keys]]) for job, keys in jobs]
            for plan, work in plans:
                _write(plan, work)
    except OSError as error:
        where = error.filename2 or error.filename
        raise KeysError(f"can't make keys: {where or 'disk'}: {error.strerror}") from None
    return [plan for plan, _ in plans]


def _write(plan: JobKeys, work: Path) -> None:
    if plan.new_files:
        parts = {AUTHORITY: plan.new_files, **{str(role.role): role.new_files for role in plan.roles}}
        tree = {f"{part}/{name}": content for part, files in parts.items() for name, content in files.items()}
        disk.put_tree(work, plan.folder, tree)
        return
    for role in plan.roles:
        if not role.folder.exists():
            disk.put_tree(work, role.folder, role.new_files)
            continue
        if KEY_FILE in role.new_files:
            disk.remove_file(role.folder / CERT_FILE)  # its private key is gone
        for name, content in role.new_files.items():
            disk.put_file(work, role.folder / name, content)
