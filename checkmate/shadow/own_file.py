"""The job file of a running node, which a restart with other ranks has it read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Final

from checkmate.job.files import JobError, read_job
from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import difference, job_ranks
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.receive.hold_plans import hold_plans


class OwnJobFile:
    """A node's job file, and what it has now. Reads it only if it was changed."""

    def __init__(self, path: Path, node_id: int, read: Callable[[Path], Job] = read_job) -> None:
        """Note how the file is now, which the node has just read."""
        self._path, self._id, self._read = path, node_id, read
        self._stamp = _stamp(path)
        self._job: Job | None = None
        self._trouble = ""

    def other_job(self, job: Job) -> tuple[Job | None, str]:
        """Return the file's job if its ranks are others than those of `job`, or why the node can't follow it.

        Returns:
            The job, or `None`; and the reason in words, or "".
        """
        if (stamp := _stamp(self._path)) != self._stamp:
            self._stamp = stamp
            try:
                self._job, self._trouble = self._read(self._path), ""
            except JobError as error:
                self._job, self._trouble = None, f"its job file was changed, and is refused: {error}"
            except OSError as error:
                self._job, self._trouble = None, f"its job file can't be read again: {error}"
        if self._job is None:
            return None, self._trouble
        if difference(job_ranks(self._job), job_ranks(job)) is None:
            return None, ""
        why = _why_not(job, self._job, self._id)
        return (None, why) if why else (self._job, "")


_MAY_CHANGE: Final = frozenset(
    ("mesh", "dp_groups", "hosts", "gpus_per_host", "replicas", "fabric", "sending", "collective")
)
"""Fields of a job that a running node can see changed: ranks, and what it does not use itself."""


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _why_not(old: Job, new: Job, node_id: int) -> str:
    """Return what of a job file a running node can't change, or ""."""
    differing = [
        member.name
        for member in fields(Job)
        if member.name not in _MAY_CHANGE and getattr(old, member.name) != getattr(new, member.name)
    ]
    if differing:
        return (
            f"in its job file, {' and '.join(differing)} changed, too, for which a node has to be started "
            "again: take that back, or save the state with `checkmate consolidate` first"
        )
    if not hold_plans(new, node_id):
        return "in its job file, no DP group has this node in its shadow_nodes any more"
    return ""


def next_ranks(file: OwnJobFile | None, job: Job) -> tuple[pb.JobRanks | None, str]:
    """Return the ranks that a node would follow instead of those of `job`, and why it can't."""
    other_job, why = (None, "") if file is None else file.other_job(job)
    return (None if other_job is None else job_ranks(other_job)), why
