"""The state of a lab on the machine: a folder under /run, its lock, and removal of all that exists.

The folder is created first and removed last, so that `down` finds everything even if the process that created
the lab has crashed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from checkmate.base.wording import did_you_mean
from topologies.describe.job_files import JOB_FILE, TOPOLOGY_FILE, Target
from topologies.describe.topology import BadDescription, LabError, LabInUse, Topology, load
from topologies.kernel import cgroups, mounts, namespaces

RUN: Final = Path("/run/checkmate/labs")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_RECORD: Final = "lab.json"


@dataclass(frozen=True)
class LabRecord:
    """State of a lab that `up` has recorded; its `target` is `None` if it has no switches."""

    lab: str
    topology: str
    target: Target | None
    cgroup: str | None


def require_root() -> None:
    """Raise `LabError` if namespaces cannot be created or cgroups are not visible."""
    if os.geteuid() != 0:
        raise LabError("labs need root, for network namespaces; run it with sudo")
    if (inside := namespaces.own_name()) is not None:
        raise LabError(f"this shell is in the namespace {inside}; leave it first, with exit")


def check_name(lab: str) -> str:
    """Return the name; raise `BadDescription` if it is not valid for a lab."""
    if not _NAME.fullmatch(lab):
        raise BadDescription(
            f"{lab!r} is not a valid lab name; use up to 32 of a-z, 0-9 and '_', a letter first"
        )
    return lab


def folder(lab: str) -> Path:
    """Return the folder of the lab's files."""
    return RUN / lab


def job_file(lab: str) -> Path:
    """Return the path of the lab's job file."""
    return folder(lab) / JOB_FILE


def lab_outside(job: Path) -> str | None:
    """Return the lab that a job file is of, unless this process is in one of its namespaces."""
    place = job.resolve()
    if place.parent.parent != RUN or not place.exists():
        return None
    lab = place.parent.name
    return None if (namespaces.own_name() or "").startswith(namespaces.name_of(lab, "")) else lab


def existing() -> list[str]:
    """Return the labs that have a folder."""
    return sorted(path.name for path in RUN.iterdir()) if RUN.is_dir() else []


def write_record(record: LabRecord) -> None:
    """Record a lab."""
    fresh = folder(record.lab) / f"{_RECORD}.new"
    fresh.write_text(json.dumps(asdict(record)))
    fresh.replace(folder(record.lab) / _RECORD)


def read_record(lab: str) -> LabRecord | None:
    """Return the record of a lab, or `None` if there is none."""
    try:
        return LabRecord(**json.loads((folder(lab) / _RECORD).read_text()))
    except FileNotFoundError:
        return None


def read_topology(record: LabRecord) -> Topology:
    """Return the topology of a recorded lab."""
    return replace(load(str(folder(record.lab) / TOPOLOGY_FILE)), name=record.topology)


def is_up(lab: str) -> bool:
    """Return whether a lab's switches run; without switches, whether its namespaces are there. Needs root."""
    record, present = read_record(lab), namespaces.of_lab(lab)
    if record is None or record.target is not None:
        return bool(namespaces.processes(present))
    names = {namespaces.name_of(lab, node) for node in read_topology(record).nodes}
    return names <= set(present)


def missing(labs: Sequence[str]) -> str:
    """Return an error message for labs that do not exist; it names those that do."""
    up = existing()
    hint = did_you_mean(labs[0], up)
    return f"no lab {' or '.join(map(repr, labs))} is up (labs that are up: {', '.join(up) or 'none'}){hint}"


@contextlib.contextmanager
def locked(lab: str) -> Iterator[None]:
    """Lock a lab against changes by others, and create its folder; raise `LabInUse` if it is locked.

    The kernel releases the lock when its holder dies.
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


def remove(lab: str) -> None:
    """Remove a lab in any state: its processes, namespaces, cgroup and folder, and empty folders above it."""
    record = read_record(lab)
    present = namespaces.of_lab(lab)
    cgroup = None if record is None else record.cgroup
    namespaces.end_processes(present, lambda: cgroups.kill(cgroup))
    for namespace in present:
        namespaces.remove(namespace)
    cgroups.remove(cgroup)
    mounts.unmount_below(folder(lab))
    shutil.rmtree(folder(lab))
    for parent in (RUN, RUN.parent):
        with contextlib.suppress(OSError):  # there are other labs
            parent.rmdir()
