"""The DP groups that train one model together: one for each rank of a host. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from checkmate.job.mesh import fits, replica_groups
from checkmate.job.schema import Job, Mesh
from checkmate.training.errors import SessionError


def groups_of_model(job: Job, group: int, replicas: Sequence[int] | None) -> tuple[int, ...]:
    """Return the DP groups that train the model of a rank of `group`, each on the same hosts.

    Args:
        job: The job.
        group: The rank's own DP group.
        replicas: The global ranks in DDP's process group, if the model has one.

    Raises:
        SessionError: Gradients would be averaged over other ranks than those of whole DP groups, or over
            groups that are not on the same hosts.
    """
    members = [{rank.rank for rank in one.ranks} for one in job.dp_groups]
    expected = replica_groups(job, group)
    if replicas is None:
        if len(expected) > 1:
            raise SessionError(
                f"the mesh of job {job.job} has several replicas on a host, which only DDP can train: wrap "
                "the model in DistributedDataParallel, or use a mesh with dp_shard x tp of gpus_per_host"
            )
        return expected
    over = set(replicas)
    found = tuple(index for index, ranks in enumerate(members) if ranks <= over)
    whole = group in found and over == set().union(*(members[index] for index in found))
    if not whole or (job.mesh is not None and found != expected):
        ranks = sorted(set().union(*(members[index] for index in expected)))
        named = f"dp_groups[{group}]" if job.mesh is None else "mesh"
        raise SessionError(
            f"DDP averages over ranks {sorted(over)}, but the job's {named} has {ranks}: "
            f"{_plain_ddp(job, len(over))}give DDP a process_group of these"
        )
    if len(found) > 1:
        _check_hosts(job, found)
    return found


def _plain_ddp(job: Job, ranks: int) -> str:
    """Return the advice to have plain DDP's mesh over this many ranks, or "" if the job can't have it."""
    if job.mesh is None or job.mesh.dp_replicate == ranks or job.mesh.pp > 1:
        return ""
    if not fits(job, Mesh(dp_replicate=ranks)):
        return ""
    return f"for plain DDP, write mesh: {{dp_replicate: {ranks}}}; else "


def _check_hosts(job: Job, groups: Sequence[int]) -> None:
    """Raise `SessionError` unless each of the groups has a rank on each of the same hosts."""
    names = " and ".join(f"dp_groups[{index}]" for index in groups)
    hosts = [sorted(rank.host or rank.place for rank in job.dp_groups[index].ranks) for index in groups]
    if any(rank.host is None for index in groups for rank in job.dp_groups[index].ranks) or any(
        one != hosts[0] for one in hosts
    ):
        raise SessionError(
            f"DDP averages over the ranks of {names}, which are not on the same hosts: give DDP a "
            "process_group of one DP group's ranks; or, if all train one model, list the job's hosts, and "
            "give each of these DP groups one rank on each host"
        )
    if job.collective != "ring":
        raise SessionError(
            f"DDP averages over the ranks of {names}, several on each host, which collective: "
            f"{job.collective} can't do yet: use collective: ring"
        )
