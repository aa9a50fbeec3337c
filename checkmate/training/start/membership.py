"""Who this process is in its job: told by the job's YAML, torchrun's environment and DDP's process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.job.files import JobError, read_job
from checkmate.job.schema import Job, ShadowNode
from checkmate.training.record.buffers import synchronised
from checkmate.wire.layout import Layout, Parameter, make_layout
from checkmate.wire.schedule import side_of

JOB_VARIABLE: Final = "CHECKMATE_JOB"


class SessionError(RuntimeError):
    """Job, environment and process groups don't fit together: the message says what would."""


@dataclass(frozen=True)
class Membership:
    """A rank's place: `rank` is its number in the job, `position` the one in its DP group's ring."""

    job: Job
    rank: int
    group: int
    position: int

    @property
    def ranks(self) -> int:
        """How many ranks its ring has."""
        return len(self.job.dp_groups[self.group].ranks)

    @property
    def ips(self) -> list[str]:
        """The ring's addresses, in ring order."""
        return [str(rank.ip) for rank in self.job.dp_groups[self.group].ranks]

    @property
    def side(self) -> int | None:
        """The boundary's side; `None` for a rank that tags nothing."""
        return side_of(self.ranks, self.position)

    @property
    def first(self) -> bool:
        """Whether it speaks for its group."""
        return self.position == 0

    @property
    def spokesman(self) -> int:
        """The global rank that speaks for its group."""
        return self.job.dp_groups[self.group].ranks[0].rank

    @property
    def shards(self) -> int:
        """How many shards its group's model has."""
        return self.job.shards(self.group)

    @property
    def nodes(self) -> list[ShadowNode]:
        """Its group's shadow nodes."""
        return [self.job.node(number) for number in dict.fromkeys(self.job.shadow_list(self.group))]

    def holders(self, shard: int) -> list[ShadowNode]:
        """The shadow nodes that hold a shard of its group."""
        return [self.job.holder(self.group, shard, i + 1) for i in range(self.job.replicas)]


def place(job: Job, rank: int, world: int, together: Sequence[int]) -> Membership:
    """The place of global rank `rank` of `world`, whose DDP process group has the ranks `together`.

    Pure. `SessionError` where the job has no such rank, another number of ranks, or another DP group.
    """
    members = [[member.rank for member in group.ranks] for group in job.dp_groups]
    total = sum(map(len, members))
    if world != total:
        raise SessionError(
            f"the job {job.job} has {total} ranks, but the process group has {world} (WORLD_SIZE): "
            "start as many as the job's dp_groups list"
        )
    group = next((i for i, ranks in enumerate(members) if rank in ranks), None)
    if group is None:
        known = ", ".join(str(number) for ranks in members for number in sorted(ranks))
        raise SessionError(f"rank {rank} is not in the job {job.job}; its dp_groups have {known}")
    if set(together) != set(members[group]):
        raise SessionError(
            f"DDP averages over ranks {sorted(together)}, but the job's dp_groups[{group}] has "
            f"{sorted(members[group])}: give DDP a process_group of these"
        )
    return Membership(job, rank, group, members[group].index(rank))


def join(module: object) -> Membership:
    """This process's place, from CHECKMATE_JOB and the process groups. `SessionError` where it has none."""
    ddp = _checked(module)
    file = os.environ.get(JOB_VARIABLE)
    if not file:
        raise SessionError(f"{JOB_VARIABLE} is not set: give it the path of the job's YAML")
    try:
        job = read_job(Path(file))
    except JobError as error:
        raise SessionError(f"{JOB_VARIABLE}: {error}") from None
    rank = dist.get_rank()
    said = os.environ.get("RANK", str(rank))
    if said != str(rank):
        raise SessionError(f"RANK is {said}, but this process is rank {rank} of its process group")
    found = place(job, rank, dist.get_world_size(), dist.get_process_group_ranks(ddp.process_group))
    if synchronised(ddp) and any(True for _ in ddp.module.buffers()):
        _check_first(found)
    return found


def _check_first(found: Membership) -> None:
    """DDP takes buffers from its group's lowest rank, and step records from the ring's first."""
    ranks = [rank.rank for rank in found.job.dp_groups[found.group].ranks]
    if ranks[0] != min(ranks):
        raise SessionError(
            f"DDP gives all ranks the buffers of rank {min(ranks)}, but the ring begins with rank "
            f"{ranks[0]}: list rank {min(ranks)} first in the job's dp_groups[{found.group}]"
        )


def _checked(module: object) -> DistributedDataParallel:
    if not isinstance(module, DistributedDataParallel):
        raise SessionError(
            f"a {type(module).__name__} is not a DistributedDataParallel: wrap the model, then pass that"
        )
    if not dist.is_initialized():
        raise SessionError("torch.distributed.init_process_group() comes first")
    if module.mixed_precision is not None:
        raise SessionError("DDP's mixed_precision keeps gradients of its own: use torch.autocast instead")
    return module


def trained(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters whose gradients DDP averages: by name, without its prefix, in registration order."""
    ignored = ddp.parameters_to_ignore
    named = ddp.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in ignored}


def lay_out(ddp: DistributedDataParallel, shards: int) -> Layout:
    """The layout of a model's trained parameters; buckets are as large as DDP's own (`bucket_cap_mb`).

    `LayoutError` names a parameter that isn't dense in memory.
    """
    parameters = [
        Parameter.of(name, p.shape, p.stride(), str(p.dtype).removeprefix("torch."))
        for name, p in trained(ddp).items()
    ]
    return make_layout(parameters, shards, ddp.bucket_bytes_cap)
