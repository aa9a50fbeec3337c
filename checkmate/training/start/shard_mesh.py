"""The meshes for `fully_shard` and `parallelize_module`, from the job's DP groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from checkmate.job.schema import Job
from checkmate.training.errors import SessionError
from checkmate.training.start.named_job import named_job

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS: Final = ("pp", "dp_replicate", "dp_shard", "tp")


def job_mesh(device_type: str) -> DeviceMesh:
    """Return the mesh of the job's ranks, whose parts are for `parallelize_module` and `fully_shard`.

    All ranks call it, once, because it makes process groups. `job_mesh("cuda")["dp_shard"]` is what
    `shard_mesh` returns. Do not give `fully_shard` the dimension `dp_replicate`: Checkmate reduces over it.

    Args:
        device_type: The devices of the ranks: `cuda` or `cpu`.

    Returns:
        A mesh of the dimensions `pp`, `dp_replicate`, `dp_shard` and `tp`, as in the `mesh` of the job, which
        CHECKMATE_JOB names. Without a `mesh`, all of the job's DP groups are shards of one model.

    Raises:
        SessionError: The job can't be read, or its DP groups have different numbers of ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - takes seconds

    return DeviceMesh(device_type, arranged(named_job()), mesh_dim_names=DIMENSIONS)


def shard_mesh(device_type: str) -> DeviceMesh:
    """Return the mesh of the shards for `fully_shard(module, mesh=...)`. All ranks call it.

    The job, named by CHECKMATE_JOB, has a DP group for each shard. The ranks at one place of all groups share
    a replica of the model: 0 and 1 with the DP groups `[0, 2]` and `[1, 3]`. With a `mesh` in the job it is
    the dimension `dp_shard` of that.

    Args:
        device_type: The devices of the ranks: `cuda` or `cpu`.

    Returns:
        A mesh of one dimension, `dp_shard`.

    Raises:
        SessionError: As `job_mesh`.
    """
    return job_mesh(device_type)["dp_shard"]


def arranged(job: Job) -> torch.Tensor:
    """Return a job's ranks, by `DIMENSIONS`. Raise `SessionError` as `job_mesh`.

    Without a `mesh` in the job, all of its DP groups are shards of one model.
    """
    groups = [[rank.rank for rank in group.ranks] for group in job.dp_groups]
    if len({len(group) for group in groups}) > 1:
        sizes = ", ".join(str(len(group)) for group in groups)
        raise SessionError(
            f"the DP groups of job {job.job} have {sizes} ranks: each shard needs the same number of replicas"
        )
    stages, shards, parts = (job.mesh.pp, job.mesh.dp_shard, job.mesh.tp) if job.mesh else (1, len(groups), 1)
    return torch.tensor(groups).view(stages, shards, parts, -1).permute(0, 3, 1, 2)
