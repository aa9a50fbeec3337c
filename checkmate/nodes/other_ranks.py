"""Finds shadow nodes whose state is of other ranks, DP groups or another mesh than the job's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from checkmate.base.wording import at_iteration, counted
from checkmate.job.schema import Job, Mesh
from checkmate.nodes.standing import Answers, counted_holds, node_name
from checkmate.rpc import shadow_pb2 as pb

RESHARDING: Final = (
    "To continue with other ranks, save the state with `checkmate consolidate`, with the job file as it was "
    "then; start the shadow nodes again with the new one; and specify restore(..., checkpoints=)"
)
_MESH: Final = tuple(field.name for field in fields(Mesh))
_MAX_SHOWN: Final = 8
"""The number of ranks of a DP group that a message names."""


class OtherRanks(RuntimeError):
    """The nodes' state is whole, but of other ranks. No older state may take its place."""


def job_ranks(job: Job) -> pb.JobRanks:
    """Return what a job's shadow nodes, and its trainers, tell each other about its ranks."""
    mesh = {} if job.mesh is None else {name: getattr(job.mesh, name) for name in _MESH}
    groups = (pb.GroupRanks(ranks=[rank.rank for rank in group.ranks]) for group in job.dp_groups)
    return pb.JobRanks(mesh=mesh, groups=groups)


def other_ranks(job: Job, answers: Answers) -> str:
    """Return which node holds something of a job with another mesh or other DP groups, or "".

    `answers` are those of the nodes. Only those with the newest run count: one that was away may come back
    with an older run, of a job file that was replaced meanwhile.
    """
    own_ranks = job_ranks(job)
    holds = counted_holds(answers)
    newest_run = max((hold.generation for _, hold in holds), default=0)
    for node in sorted({node for node, hold in holds if hold.generation == newest_run}):
        answer = answers[node]
        if isinstance(answer, str) or not answer.job_ranks.groups:
            continue
        if sizes := difference(answer.job_ranks, own_ranks):
            newest = max((hold.stepped for hold in answer.holds), default=-1)
            return (
                f"{node_name(job, node)} holds a state {at_iteration(newest)}, and its job file has "
                f"{sizes[0]}, but the job now has {sizes[1]}"
            )
    return ""


def difference(old_ranks: pb.JobRanks, new_ranks: pb.JobRanks) -> tuple[str, str] | None:
    """Return, in words, what two job files have instead of each other; `None` if ranks train the same.

    A job with a mesh, and one that lists the DP groups of that mesh, do not differ.
    """
    old, new = dict(old_ranks.mesh), dict(new_ranks.mesh)
    names = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    if old and new and names:
        return _mesh(old, names), _mesh(new, names)
    if [len(group.ranks) for group in old_ranks.groups] != [len(group.ranks) for group in new_ranks.groups]:
        return _sizes(old_ranks), _sizes(new_ranks)
    for number, (before, now) in enumerate(zip(old_ranks.groups, new_ranks.groups, strict=True)):
        if before != now:
            return (
                f"DP group {number} with ranks {_ranks_words(before)}",
                f"it with ranks {_ranks_words(now)}",
            )
    return None


def _mesh(mesh: Mapping[str, int], names: list[str]) -> str:
    dimensions = [name for name in _MESH if name in names]
    return f"a mesh with {' and '.join(f'{name} {mesh.get(name, 0)}' for name in dimensions)}"


def _sizes(job_ranks: pb.JobRanks) -> str:
    sizes = " and ".join(map(str, sorted({len(group.ranks) for group in job_ranks.groups})))
    return f"{counted(len(job_ranks.groups), 'DP group')} of {sizes or 'no'} ranks"


def _ranks_words(group: pb.GroupRanks) -> str:
    more = ", ..." if len(group.ranks) > _MAX_SHOWN else ""
    return ", ".join(map(str, group.ranks[:_MAX_SHOWN])) + more
