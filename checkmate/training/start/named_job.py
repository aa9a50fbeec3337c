"""The job that CHECKMATE_JOB names, and the meshes of its ranks.

It is read again only if one of its files has changed. A job of thousands of ranks takes a second to read and
check, and `shard_mesh`, `restore` and `protect` each need it. So does each start: a job that was checked
before is taken from the user's cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from checkmate.job.kept import CheckedJob, keep, read_kept
from checkmate.job.partial import with_replicas
from checkmate.job.schema import JOB_VARIABLE, Job
from checkmate.training.errors import SessionError

_last_job: dict[Path, CheckedJob] = {}
"""By the absolute path of the job file; the last one only."""


_present: list[int] = []
"""The replicas of the job that are there; none are named if all are."""


def follow_replicas(present: Sequence[int]) -> None:
    """Have `named_job` return the job with these replicas alone; all, if none are named."""
    _present[:] = present


def named_job() -> Job:
    """Return the job that CHECKMATE_JOB names, with the replicas that are there.

    Raise `SessionError` if there is none.
    """
    job = whole_job()
    return with_replicas(job, _present) if _present else job


def whole_job() -> Job:
    """Return the job that CHECKMATE_JOB names, with all replicas. Raise `SessionError` if there is none."""
    name = os.environ.get(JOB_VARIABLE)
    if not name:
        raise SessionError(f"{JOB_VARIABLE} is not set: set it to the path of the job's YAML")
    file = Path(name).absolute()  # so that paths in the job are absolute, too
    current = _last_job.get(file)
    if current is None or not current.is_current():
        current = read_kept(file) or _read(file)
        _last_job.clear()
        _last_job[file] = current
    return current.job


def _read(file: Path) -> CheckedJob:
    """Read, check and keep a job."""
    from checkmate.job.files import JobError, read_checked  # noqa: PLC0415 - takes as long as all the rest

    try:
        job_and_files = read_checked(file)
    except JobError as error:
        raise SessionError(f"{JOB_VARIABLE}: {error}") from None
    if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun's: one process of a host is enough
        keep(file, job_and_files)
    return job_and_files


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS: Final = ("pp", "dp_replicate", "dp_shard", "tp")


def job_mesh(device_type: str) -> DeviceMesh:
    """Return the mesh of the job's ranks, whose parts are for `parallelize_module` and `fully_shard`.

    All ranks call it, once, because it makes process groups. `job_mesh("cuda")["dp_shard"]` is what
    `shard_mesh` returns. Give `fully_shard` the dimension `dp_replicate` only with copies by hosts: else
    Checkmate reduces over it.

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
        SessionError: As `job_mesh`; or nobody would reduce over the replicas, because hosts copy gradients.
    """
    job = named_job()
    if job.copies == "host" and any(len(group.ranks) > 1 for group in job.dp_groups):
        raise SessionError(
            f"job {job.job} has copies by hosts, with which FSDP itself reduces over the replicas: give "
            f'fully_shard both dimensions, checkmate.job_mesh("{device_type}")["dp_replicate", "dp_shard"]'
        )
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
