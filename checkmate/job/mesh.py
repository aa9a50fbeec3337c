"""Jobs whose ranks are a mesh: which meshes are possible, and where a DP group is in one. Pure.

`mesh_groups` makes the DP groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from checkmate.base.wording import counted
from checkmate.job.faults import Fault
from checkmate.job.fields import RANKS_LAST
from checkmate.job.schema import Job, Mesh

KEY: Final = "mesh"
_OF_GROUPS: Final = ("pp", "dp_shard", "tp")
"""Dimensions that number the groups, row by row."""
LOCAL: Final = "local_rank"
"""The last such dimension, of a mesh with several replicas on a host."""


def impossible(mesh: Mesh, hosts: int, gpus: int, collective: object) -> Iterator[Fault]:
    """Yield why these hosts can't have a mesh."""
    yield from _misfits(mesh, hosts, gpus)
    yield from _beyond_nccl(collective, mesh, gpus)


def _misfits(mesh: Mesh, hosts: int, gpus: int) -> Iterator[Fault]:
    """Yield why the ranks of a mesh are not on these hosts, or not apart."""
    inner = mesh.dp_shard * mesh.tp
    ranks = mesh.pp * mesh.dp_replicate * inner
    if ranks > RANKS_LAST + 1:
        yield Fault((KEY,), f"has {ranks:,} ranks, and a job has {RANKS_LAST + 1:,} at most")
    elif ranks != hosts * gpus:
        have = f"{counted(hosts, 'host')} with gpus_per_host: {gpus} have {hosts * gpus:,}"
        yield Fault((KEY,), f"has {ranks:,} ranks, but {have}; change the mesh, hosts or gpus_per_host")
    elif 1 < inner < gpus:
        yield Fault(
            (KEY,),
            f"puts ranks 0 and {inner} of one DP group on the same host, because dp_shard x tp is {inner}, "
            f"less than gpus_per_host: {gpus}; a switch copies what passes between hosts, so make it "
            f"{gpus} or more, or 1 for DDP, or list dp_groups",
        )
    elif inner == 1 and (mesh.dp_replicate % gpus or mesh.dp_replicate == gpus):
        yield Fault(
            (KEY,),
            f"has {mesh.dp_replicate} replicas for gpus_per_host: {gpus}; a switch copies what passes "
            f"between hosts, so make dp_replicate a multiple of {gpus}, and more than that",
        )


def _beyond_nccl(collective: object, mesh: Mesh, gpus: int) -> Iterator[Fault]:
    """Yield that only our own ring sums gradients within hosts."""
    if collective == "nccl" and (local := replicas_on_a_host(mesh, gpus)) > 1:
        yield Fault(
            ("collective",),
            f"nccl can't sum over the {local} replicas that the mesh puts on each host yet: use ring or "
            f"tree, or make the ranks of a host shards of one replica (dp_shard: {gpus})",
        )


def fits(job: Job, mesh: Mesh) -> bool:
    """Return whether a job's ranks and hosts could have this mesh instead of their own."""
    gpus = job.gpus_per_host or 1
    hosts = job.rank_count // gpus
    return not any(impossible(mesh, hosts, gpus, job.collective))


def replicas_on_a_host(mesh: Mesh, gpus: int) -> int:
    """Return the number of replicas of the model that a host has: 1 if its ranks are shards of one."""
    return gpus if mesh.dp_shard * mesh.tp == 1 else 1


def replica_groups(job: Job, group: int) -> tuple[int, ...]:
    """Return the DP groups that train a group's model by the job's mesh: itself, and those beside it."""
    local = dimensions(job).get(LOCAL, 1)
    first = group - group % local
    return tuple(range(first, first + local))


def dimensions(job: Job) -> dict[str, int]:
    """Return the sizes of the dimensions that number DP groups; empty for a job without a mesh."""
    if job.mesh is None:
        return {}
    sizes = {name: getattr(job.mesh, name) for name in _OF_GROUPS}
    local = replicas_on_a_host(job.mesh, job.gpus_per_host or 1)
    return {**sizes, LOCAL: local} if local > 1 else sizes


def coordinates(job: Job, group: int) -> dict[str, int]:
    """Return a DP group's place in the mesh, by dimension; empty for a job without a mesh."""
    place = {}
    for name, size in reversed(dimensions(job).items()):
        group, place[name] = divmod(group, size)
    return dict(reversed(place.items()))


def group_name(job: Job, group: int) -> str:
    """Return a DP group's name in messages: `11 (pp 1, dp_shard 3)`; without dimensions of size 1."""
    sizes = dimensions(job)
    parts = [f"{name} {at}" for name, at in coordinates(job, group).items() if sizes[name] > 1]
    return f"{group} ({', '.join(parts)})" if parts else str(group)


def sizes(job: Job) -> str:
    """Return the dimensions over which DP groups are counted, as ` (pp 2 x dp_shard 8)`; or an empty text."""
    parts = [f"{name} {size}" for name, size in dimensions(job).items() if size > 1]
    return f" ({' x '.join(parts)})" if parts else ""


def groups_key(job: Job) -> str:
    """Return the key of the job file from which DP groups are."""
    return "dp_groups" if job.mesh is None else KEY
