"""The job of a running node, whose file a restart with other ranks has it read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from checkmate.job.files import JobError, read_job
from checkmate.job.partial import with_replicas
from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import is_part_of, job_ranks
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import locks
from checkmate.shadow.receive.hold_plans import hold_plans

_MAY_CHANGE: Final = frozenset(
    (
        "mesh",
        "dp_groups",
        "hosts",
        "gpus_per_host",
        "replicas",
        "fabric",
        "sending",
        "collective",
        "tree_bytes",
    )
) | {"min_replicas", "replacement_seconds"}
"""Fields of a job that a running node can see changed: ranks, and what it does not use itself.

A start whose groups have trees where the node knows none, or the reverse, is refused as it begins.
"""


@dataclass(frozen=True)
class _Reading:
    """What was found when the file was read last."""

    stamp: tuple[int, int, int] | None
    whole: Job
    """The job in it, as far as the node could follow it."""
    trouble: str = ""
    """Why the node can't follow it as it is now, or ""."""


class OwnJobFile:
    """A node's job file, and what it has now. Reads it only if it was changed.

    Files may be on a disk that takes seconds. So only `read_again` reads, and no thread calls it with the
    node's lock.
    """

    def __init__(self, path: Path, job: Job, node_id: int, read: Callable[[Path], Job] = read_job) -> None:
        """Note how the file is now, of which the node has just read this job."""
        self._path, self._id, self._read = path, node_id, read
        self._first = job
        self._lock = locks.ordered_lock("job file")
        self._reading = _Reading(_stamp(path), job)

    def read_again(self) -> None:
        """Read the file again if it was changed. Waits if another thread does."""
        with self._lock:
            before = self._reading
            if (stamp := _stamp(self._path)) == before.stamp:
                return
            whole = before.whole
            try:
                job = self._read(self._path)
            except JobError as error:
                trouble = f"its job file was changed, and is refused: {error}"
            except OSError as error:
                trouble = f"its job file can't be read again: {error}"
            else:
                trouble = _why_not(self._first, job, self._id)
                whole = whole if trouble else job
            self._reading = _Reading(stamp, whole, trouble)

    def next_ranks(self, followed: Job) -> tuple[pb.JobRanks | None, str]:
        """Return the ranks that the file has in place of those of a job, or why the node can't follow it.

        Fewer replicas than in the file are no other ranks, if the job may go on with them.
        """
        reading = self._reading
        if reading.trouble or is_part_of(reading.whole, job_ranks(followed)):
            return None, reading.trouble
        return job_ranks(reading.whole), ""

    def job_for(self, ranks: pb.JobRanks) -> tuple[Job | None, str]:
        """Return the file's job, if a start may have these ranks, or why the node can't follow the file.

        Returns:
            The job, or `None`; and the reason in words, or "".
        """
        reading = self._reading
        if reading.trouble or not is_part_of(reading.whole, ranks):
            return None, reading.trouble
        return with_replicas(reading.whole, ranks.present) if ranks.present else reading.whole, ""


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
        if member.name not in _MAY_CHANGE and _unordered(old, member.name) != _unordered(new, member.name)
    ]
    if differing:
        return (
            f"in its job file, {' and '.join(differing)} changed, too, for which a node has to be started "
            "again: take that back, or save the state with `checkmate consolidate` first"
        )
    if not hold_plans(new, node_id):
        return "in its job file, no DP group has this node in its shadow_nodes any more"
    return ""


def _unordered(job: Job, name: str) -> object:
    """Return what a job has in a field; shadow nodes by their ids, because groups say which holds what."""
    value = getattr(job, name)
    return sorted(value, key=lambda node: node.id) if name == "shadow_nodes" else value
