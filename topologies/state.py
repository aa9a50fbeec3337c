"""What the machine remembers of a lab: a folder under /run, and its lock.

The folder exists before anything else of the lab does, and goes last, so that `down` finds all there is
whatever happened to the process that made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from topologies.describe.job_files import JOB_FILE, Target
from topologies.describe.topology import BadDescription, LabInUse

RUN: Final = Path("/run/checkmate/labs")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_RECORD: Final = "lab.json"


@dataclass(frozen=True)
class LabRecord:
    """What `up` wrote down."""

    lab: str
    topology: str
    target: Target
    cgroup: str | None


def check_name(lab: str) -> str:
    """The name, where it is one that a lab may have; else `BadDescription`."""
    if not _NAME.fullmatch(lab):
        raise BadDescription(
            f"a lab can't be called {lab!r}; use up to 32 of a-z, 0-9 and '_', a letter first"
        )
    return lab


def folder(lab: str) -> Path:
    """Where the lab's files are."""
    return RUN / lab


def job_file(lab: str) -> Path:
    """The lab's job YAML."""
    return folder(lab) / JOB_FILE


def existing() -> list[str]:
    """The labs that have left a folder."""
    return sorted(path.name for path in RUN.iterdir()) if RUN.is_dir() else []


def write_record(record: LabRecord) -> None:
    """Remember a lab."""
    fresh = folder(record.lab) / f"{_RECORD}.new"
    fresh.write_text(json.dumps(asdict(record)))
    fresh.replace(folder(record.lab) / _RECORD)


def read_record(lab: str) -> LabRecord | None:
    """What is remembered of a lab; `None` where nothing is."""
    try:
        return LabRecord(**json.loads((folder(lab) / _RECORD).read_text()))
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def locked(lab: str) -> Iterator[None]:
    """Be the only one who changes this lab; makes its folder. `LabInUse` names who has it else.

    The kernel lets go of the lock when its holder dies, however it dies.
    """
    descriptor = _open_lock(lab)
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _open_lock(lab: str) -> int:
    path = folder(lab) / "lock"
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # another process has just removed the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode() or "?"
            os.close(descriptor)
            raise LabInUse(f"lab {lab} is in use by process {holder}; stop that first (Ctrl-C)") from None
        except FileNotFoundError:
            pass  # as above
        os.close(descriptor)


def forget(lab: str) -> None:
    """Remove the lab's folder, and the folders above that are empty then."""
    shutil.rmtree(folder(lab), ignore_errors=False)
    for parent in (RUN, RUN.parent):
        with contextlib.suppress(OSError):  # other labs are there
            parent.rmdir()
