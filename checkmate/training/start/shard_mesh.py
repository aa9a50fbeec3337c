"""The mesh for `fully_shard`, from the job's DP groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from checkmate.training.errors import SessionError
from checkmate.training.start.membership import named_job

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_mesh(device_type: str) -> DeviceMesh:
    """Return the mesh of the shards for `fully_shard(module, mesh=...)`. All ranks call it.

    The job, named by CHECKMATE_JOB, has a DP group for each shard. The ranks at one place of all groups share
    a replica of the model: 0 and 1 with the DP groups `[0, 2]` and `[1, 3]`.

    Args:
        device_type: The devices of the ranks: `cuda` or `cpu`.

    Returns:
        A mesh of one dimension, `dp_shard`.

    Raises:
        SessionError: The job can't be read, or its DP groups have different numbers of ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - takes seconds

    job = named_job()
    groups = [[rank.rank for rank in group.ranks] for group in job.dp_groups]
    if len({len(group) for group in groups}) > 1:
        sizes = ", ".join(str(len(group)) for group in groups)
        raise SessionError(
            f"the DP groups of job {job.job} have {sizes} ranks: each shard needs the same number of replicas"
        )
    mesh = DeviceMesh(device_type, torch.tensor(groups).T, mesh_dim_names=("dp_replicate", "dp_shard"))
    return mesh["dp_shard"]
