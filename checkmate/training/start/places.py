"""This process's place in its job, from the job's YAML, torchrun's environment and DDP's process group.

Also what `restore` hands over to `protect`, and which model is protected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Final

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from checkmate.base.wording import counted
from checkmate.job.boundaries import first_shadow_ids
from checkmate.job.mesh import fits, group_name, replica_groups
from checkmate.job.schema import Job, Mesh, Rank, ShadowNode
from checkmate.keys.access import access
from checkmate.keys.folder import RoleKeys
from checkmate.keys.roles import Role
from checkmate.nccl.interfaces import interface_of
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.attached import AttachedData, attach, attached
from checkmate.training.errors import SessionError
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.copied_state import CopiedState, Follow, copied_state_of
from checkmate.training.record.generators import RestoredTensors
from checkmate.training.start import exchange
from checkmate.training.start.plans import FromNodes, RestartPlan
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import described, parameter_of
from checkmate.wire.schedule import RING_SLICING, Slicing, side_of
from checkmate.wire.shares import WHOLE, Share

_log: Final = logging.getLogger("checkmate")


@dataclass(frozen=True)
class Place:
    """A rank's place in its job."""

    job: Job
    rank: int
    """The global rank."""
    group: int
    """Index of its DP group."""
    position: int
    """Position in its DP group's ring."""
    together: tuple[int, ...] = ()
    """The DP groups that train its model, a share of it each, on hosts with several ranks; else empty."""
    followed: bool = True
    """Whether shadow nodes follow; they can't if gradients are not tagged."""

    @property
    def ranks(self) -> int:
        """Number of ranks in its ring."""
        return len(self.job.dp_groups[self.group].ranks)

    @property
    def ips(self) -> list[str]:
        """Addresses of the ring, in ring order."""
        return [str(rank.ip) for rank in self.job.dp_groups[self.group].ranks]

    @property
    def interface(self) -> str | None:
        """This rank's interface, if its host has several in the job. May raise `SessionError`."""
        member = self.job.dp_groups[self.group].ranks[self.position]
        if not any(host.name == member.host and len(host.nics) > 1 for host in self.job.hosts):
            return None
        try:
            return interface_of(member.ip)
        except ValueError as error:
            raise SessionError(f"{self.name}: {error}") from None

    @property
    def names(self) -> list[str]:
        """Names of the ring's ranks in messages, in ring order."""
        return [rank.named for rank in self.job.dp_groups[self.group].ranks]

    @property
    def name(self) -> str:
        """This rank's name in messages."""
        return self.names[self.position]

    def name_of(self, rank: int) -> str:
        """Return the name of any rank of the job in messages."""
        ranks = [member for group in self.job.dp_groups for member in group.ranks]
        return next((member.named for member in ranks if member.rank == rank), f"rank {rank}")

    @property
    def share(self) -> Share:
        """The share of the model that its group reduces."""
        return Share(self.together.index(self.group), len(self.together)) if self.together else WHOLE

    @property
    def host_ranks(self) -> list[Rank]:
        """The ranks on its host that train its model, one of each DP group; it alone by default."""
        member = self.job.dp_groups[self.group].ranks[self.position]
        groups = [self.job.dp_groups[group].ranks for group in self.together or [self.group]]
        return [rank for ranks in groups for rank in ranks if rank is member or rank.host == member.host]

    @property
    def replicas(self) -> int:
        """Number of ranks that train its model."""
        return self.ranks * self.share.count

    @property
    def side(self) -> int | None:
        """Side of the boundary, 0 or 1; `None` for a rank that does not tag."""
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
        """Number of shards of its group's model."""
        return self.job.shards(self.group)

    @cached_property
    def first_id(self) -> int:
        """The shadow id on the wire of its group's shard 0."""
        return first_shadow_ids(self.job)[self.group]

    @property
    def nodes(self) -> list[ShadowNode]:
        """Shadow nodes of its group that follow."""
        if not self.followed:
            return []
        return [self.job.node(number) for number in dict.fromkeys(self.job.shadow_list(self.group))]

    def keys(self) -> RoleKeys | None:
        """Return the keys of role trainer; `None` with CHECKMATE_INSECURE=1. May raise `KeysError`."""
        return access(self.job, Role.TRAINER).keys

    def holders(self, shard: int) -> list[ShadowNode]:
        """Return the shadow nodes that hold a shard of its group."""
        return [self.job.holder(self.group, shard, i + 1) for i in range(self.job.replicas)]


def place_of(job: Job, rank: int, world: int, together: Sequence[int] | None) -> Place:
    """Return a rank's place.

    Args:
        job: The job.
        rank: The global rank.
        world: The number of ranks of the default process group.
        together: The global ranks in DDP's process group, if the model has one.

    Raises:
        SessionError: The job does not have this rank, or has another number of ranks, or other DP groups.
    """
    members = [[member.rank for member in group.ranks] for group in job.dp_groups]
    total = sum(map(len, members))
    if world != total:
        raise SessionError(
            f"the job {job.job} has {counted(total, 'rank')}, but the process group has {world} "
            f"(WORLD_SIZE): start {total} with torchrun, or correct the job file"
        )
    group = next((i for i, ranks in enumerate(members) if rank in ranks), None)
    if group is None:
        numbers = ", ".join(str(number) for ranks in members for number in sorted(ranks))
        raise SessionError(f"rank {rank} is not in the job {job.job}; its dp_groups have {numbers}")
    groups = groups_of_model(job, group, together)
    return Place(job, rank, group, members[group].index(rank), groups if len(groups) > 1 else ())


def join(model: TrainedModel, job: Job) -> Place:
    """Return this process's place in its job, from the process groups.

    For a sharded model all ranks call it.

    Raises:
        SessionError: It has none, or DP groups contradict the model's shards.
    """
    expected, count = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    total = job.rank_count
    if not dist.is_initialized() and (int(count) if count else total) != 1:
        alone = f"; or, if this process trains alone, give the job {job.job} one rank, not {total}"
        raise SessionError(f"call torch.distributed.init_process_group() first{'' if count else alone}")
    rank, world = exchange.rank_and_world()
    if expected not in (None, str(rank)):
        raise SessionError(f"RANK is {expected}, but this process is rank {rank} of its process group")
    place = place_of(job, rank, world, model.replicas)
    if model.is_alone and place.ranks > 1:
        raise SessionError(
            f"a ZeroRedundancyOptimizer gives each rank parameters of its own, but the job {job.job} has "
            f"{counted(place.ranks, 'rank')} with the same: in the job file, write "
            f"mesh: {{dp_shard: {world}}} in place of ranks"
        )
    if model.shard_ranks:
        _check_shards(place, model)
    number, *_ = place.together or [place.group]
    spokesman = job.dp_groups[number].ranks[0].rank
    first = min(model.replicas or [spokesman])
    # The ring's first rank records buffers.
    if model.broadcasts_buffers and any(True for _ in model.inner.buffers()) and spokesman != first:
        raise SessionError(
            f"DDP broadcasts the buffers of rank {first}, but the ring begins with rank "
            f"{spokesman}: list rank {first} first in the job's dp_groups[{number}]"
        )
    return place


_ADVICE: Final = {
    "switch": (
        "make FSDP's mesh with checkmate.shard_mesh or checkmate.job_mesh, from a job with a mesh, or with "
        "a DP group for the ranks of each part"
    ),
    "host": "give the job file the script's mesh, such as mesh: {{dp_shard: {parts}}}, in place of ranks",
}
"""How a job's DP groups come to be the replicas of one part, by its way of copies."""


def _check_shards(place: Place, model: TrainedModel) -> None:
    """Raise `SessionError` on all ranks if a DP group's ranks don't train a part alike. All ranks call it."""
    part = [model.shard_ranks.index(place.rank), len(model.shard_ranks), model.averages]
    parts_by_rank = exchange.gather(part, name_of=place.name_of)
    for number, group in enumerate(place.job.dp_groups):
        name = f"DP group {group_name(place.job, number)}"
        first, *rest = (member.rank for member in group.ranks)
        for rank in rest:
            (first_part, parts, averages), (another, more, also) = parts_by_rank[first], parts_by_rank[rank]
            if averages != also:
                raise SessionError(
                    f"{name}: only one of {place.name_of(first)} and {place.name_of(rank)} has "
                    "set_gradient_divide_factor: call it on all ranks, or on none"
                )
            if (first_part, parts) != (another, more):
                raise SessionError(
                    f"{name} has {place.name_of(first)} with part {first_part} of {parts} of the model and "
                    f"{place.name_of(rank)} with part {another} of {more}, but the ranks of a DP group have "
                    f"replicas of one part: {_ADVICE[place.job.copies].format(parts=parts)}"
                )


def lay_out(
    model: TrainedModel,
    shards: int,
    slicing: Slicing = RING_SLICING,
    share: Share = WHOLE,
    copied: CopiedState | None = None,
) -> Layout:
    """Return the layout of a model's parameters; with `copied`, of the state that is copied, too.

    Raises:
        LayoutError: A parameter is not dense in memory.
    """
    parameters = model.describe() if copied is None else copied.described
    return make_layout(parameters, shards, model.bucket_bytes, slicing, model.describe_frozen(), share)


def lay_out_shares(
    model: TrainedModel, place: Place, slicing: Slicing, copied: CopiedState | None = None
) -> dict[int, Layout]:
    """Return the layouts of all DP groups that train a model, by group. Args and errors: as in `lay_out`."""
    groups = place.together or (place.group,)
    return {
        group: lay_out(model, place.job.shards(group), slicing, Share(index, len(groups)), copied)
        for index, group in enumerate(groups)
    }


def copied_state(
    place: Place, model: TrainedModel, optimizer: torch.optim.Optimizer, follow: Follow
) -> CopiedState | None:
    """Return what is copied in place of gradients, or `None`; as `copied_state_of`. All ranks call it."""
    copied = copied_state_of(model, optimizer, follow, place.job.copies)
    if copied is not None:
        _share_out(place, copied)
    return copied


def _share_out(place: Place, copied: CopiedState) -> None:
    """Have all ranks know which state only one rank of a DP group has. All ranks call it.

    Raise `UnsupportedOptimizer` if ranks have different entries of one name.
    """
    entries = [described(entry) for entry in copied.described if entry.state]
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    digests = exchange.gather(digest, name_of=place.name_of)
    members = [[member.rank for member in group.ranks] for group in place.job.dp_groups]
    if all(len({digests[rank] for rank in ranks}) == 1 for ranks in members):
        return
    tables = exchange.gather(entries, name_of=place.name_of)
    copied.share_out([[parameter_of(entry) for entry in tables[rank]] for rank in members[place.group]])


def seeded_by(place: Place, layout: Layout, shard: int) -> list[int]:
    """Return the parameters of a shard that this rank seeds.

    Of n ranks, the one at ring position p seeds the shards s with s mod n = p, without what only another
    rank has.
    """
    usual = shard % place.ranks
    numbers = layout.of_shard(shard)
    return [n for n in numbers if (layout.parameters[n].owner or (usual,))[0] == place.position]


@dataclass
class Start:
    """The outcome of `restore`, kept for `protect`."""

    plan: RestartPlan
    next_iteration: int = 0
    keep: bool = False
    """Whether nodes may go on with the holds that they have: known once layouts and buffers are compared."""
    record: pb.IterationRecord = field(default_factory=pb.IterationRecord)
    extra: RestoredTensors = field(default_factory=lambda: RestoredTensors(None))
    follow: str | None = None
    """The `follow=` of `restore`, which must be that of `protect`, too; `None` without a `restore`."""
    copied: CopiedState | None = None
    """The state that is copied in place of gradients, if it was restored."""
    stayed: Sequence[int] = ()
    """The ranks whose processes have stayed over a failure, after which they restart in place."""
    survivors: Sequence[int] = ()
    """Those of them that have kept parameters and optimizer state."""
    former_groups: Sequence[int] = ()
    """DP groups of former ranks whose state this rank's stage goes on with."""

    @property
    def same_holds(self) -> bool:
        """Whether nodes go on with the same holds, and not with what other ranks have left of the state."""
        return self.keep and not (isinstance(self.plan, FromNodes) and self.plan.former)


class Handover(AttachedData):
    """What `restore` of a model hands over to its `protect`, and whether it is protected."""

    protected: ClassVar[Handover | None] = None
    """The protected model's. There is one at a time, because a process has one place in its job."""
    has_protected: ClassVar[bool] = False
    """Whether a model of this process was protected before: what nodes hold is this process's own."""

    def __init__(self) -> None:
        self._start: Start | None = None
        self._stubs: Stubs | None = None
        self._hooks: list[RemovableHandle] = []

    @classmethod
    def of(cls, model: TrainedModel) -> Handover:
        """Return a model's handover. Raise `SessionError` if a model is protected."""
        handover = attached(model.inner, cls)
        if handover is None:
            handover = cls()
            attach(model.inner, handover)
        if cls.protected is handover:
            raise SessionError("this model is already protected: close its Protection first")
        if cls.protected is not None:
            raise SessionError(
                "another model of this process is already protected: close its Protection first, because a "
                "process can protect only one. Put both into one module in one DistributedDataParallel, and "
                "give their optimizers as a list (`checkmate docs training`)"
            )
        return handover

    def restored(self, start: Start, stubs: Stubs, *, first: bool) -> None:
        """Keep the outcome of `restore` for `protect`.

        Connections to shadow nodes are kept, too, on the `first` rank of a DP group. Others need none while
        they train, so theirs are closed.
        """
        self._start = start
        if first:
            self._stubs = stubs
        else:
            stubs.close()

    def warn_if_unprotected(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Log a warning if one of these steps before `protect` is called: a crash would repeat everything."""

        def warn(*_: object) -> None:
            self._end_hooks()
            _log.warning(
                "an optimizer steps after checkmate.restore, and checkmate.protect was not called: shadow "
                "nodes do not follow, so nothing of this training is kept"
            )

        self._end_hooks()
        self._hooks = [optimizer.register_step_pre_hook(warn) for optimizer in optimizers]

    def _end_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take_start(self) -> Start | None:
        """Return the outcome of the last `restore`, and forget it."""
        self._end_hooks()
        start, self._start = self._start, None
        return start

    def take_stubs(self, job: Job, keys: RoleKeys | None) -> Stubs:
        """Return those of the last `restore` if they are of this job and keys, else new ones.

        The caller closes them.
        """
        stubs, self._stubs = self._stubs, None
        if stubs is not None:
            if (stubs.job, stubs.keys) == (job, keys):
                return stubs
            stubs.close()
        return Stubs(job, keys)

    def hold(self) -> None:
        """Note that the model is protected."""
        Handover.protected = self

    def release(self) -> None:
        """Note that the model is not protected any more."""
        Handover.protected = None
        Handover.has_protected = True


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
    members = [{rank.rank for rank in dp_group.ranks} for dp_group in job.dp_groups]
    expected = replica_groups(job, group)
    if replicas is None:
        if len(expected) > 1:
            raise SessionError(
                f"the mesh of job {job.job} has several replicas on a host, which only DDP can train: wrap "
                "the model in DistributedDataParallel, or use a mesh with dp_shard x tp of gpus_per_host"
            )
        return expected
    replica_set = set(replicas)
    groups = tuple(index for index, ranks in enumerate(members) if ranks <= replica_set)
    whole = group in groups and replica_set == set().union(*(members[index] for index in groups))
    if not whole or (job.mesh is not None and groups != expected):
        ranks = sorted(set().union(*(members[index] for index in expected)))
        field = f"dp_groups[{group}]" if job.mesh is None else "mesh"
        raise SessionError(
            f"DDP averages over ranks {sorted(replica_set)}, but the job's {field} has {ranks}: "
            f"{_plain_ddp(job, len(replica_set))}give DDP a process_group of these"
        )
    if len(groups) > 1:
        _check_hosts(job, groups)
    return groups


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
        host_list != hosts[0] for host_list in hosts
    ):
        raise SessionError(
            f"DDP averages over the ranks of {names}, which are not on the same hosts: give DDP a "
            "process_group of one DP group's ranks; or, if all train one model, list the job's hosts, and "
            "give each of these DP groups one rank on each host"
        )
    if job.collective == "nccl":
        raise SessionError(
            f"DDP averages over the ranks of {names}, several on each host, which collective: "
            f"{job.collective} can't do yet: use collective: ring or tree"
        )
