"""A job without some of its replicas: the ranks that go on until the others are back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from checkmate.job.schema import Job


@dataclass(frozen=True, kw_only=True)
class PartialJob(Job):
    """A job of which some replicas are there. Its ranks are numbered from 0, in the whole job's order."""

    present: tuple[int, ...]
    """The replicas that are there: positions in each DP group of the whole job."""


def replicas_there(job: Job, ranks: Collection[int]) -> tuple[int, ...]:
    """Return the replicas of a whole job all of whose ranks are among these."""
    positions = range(len(job.dp_groups[0].ranks))
    return tuple(i for i in positions if all(group.ranks[i].rank in ranks for group in job.dp_groups))


def with_replicas(job: Job, present: Sequence[int]) -> Job:
    """Return a whole job with these replicas alone, in order; the job itself if they are all."""
    if len(present) == len(job.dp_groups[0].ranks):
        return job
    numbers = sorted(group.ranks[i].rank for group in job.dp_groups for i in present)
    number_of = {rank: number for number, rank in enumerate(numbers)}
    groups = tuple(
        replace(
            group, ranks=tuple(replace(group.ranks[i], rank=number_of[group.ranks[i].rank]) for i in present)
        )
        for group in job.dp_groups
    )
    mesh = None if job.mesh is None else replace(job.mesh, dp_replicate=len(present))
    return with_present(job, tuple(present), mesh=mesh, dp_groups=groups)


def with_present(job: Job, present: tuple[int, ...], **changes: Any) -> Job:
    """Return a job with changes, of which these replicas are there; all, if none are named."""
    values = {member.name: getattr(job, member.name) for member in fields(Job)} | changes
    return PartialJob(**values, present=present) if present else Job(**values)


def present_of(job: Job) -> tuple[int, ...]:
    """Return the replicas of a job that are there; none are named if it is whole."""
    return job.present if isinstance(job, PartialJob) else ()
