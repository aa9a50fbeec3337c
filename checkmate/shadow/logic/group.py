"""A DP group on a node: the checked `Begin` request, its step records and its holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from checkmate.job.schema import Job
from checkmate.optim.supported import SUPPORTED, steps_alike
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.hold_state import HoldState
from checkmate.shadow.logic.records import Records
from checkmate.wire.layout import Layout, LayoutError, from_json


class CallRefused(Exception):
    """A refused call. If `precondition`, it may succeed in another state of the node."""

    def __init__(self, message: str, *, precondition: bool = False) -> None:
        super().__init__(message)
        self.precondition = precondition


Start = tuple[int, str, int, bytes]
"""A start of training: incarnation, run, first iteration, and random bytes that make it unique."""


def start_of(begin: pb.BeginRequest) -> Start:
    """Return the start of training to which a `Begin` belongs."""
    return (begin.incarnation, begin.run, begin.first_iteration, begin.start)


@dataclass
class ShadowGroup:
    """One incarnation of a DP group."""

    begin: pb.BeginRequest
    layout: Layout
    records: Records
    holds: list[HoldState] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    """Reasons, by shard, why a restart dropped the hold; kept until the next `Begin`."""

    @property
    def newest(self) -> int:
        """The newest iteration that the trainers are known to have reached."""
        seen = [hold.receiving for hold in self.holds]
        return max([self.records.newest + 1, self.begin.next_iteration, *seen])

    def hold(self, shard: int) -> HoldState:
        """Return a shard's hold. Raise `CallRefused` if the node has none."""
        for hold in self.holds:
            if hold.plan.shard == shard:
                return hold
        raise CallRefused(f"this node does not hold shard {shard} of group {self.begin.group}")


def check_begin(job: Job, request: pb.BeginRequest) -> Layout:
    """Return the layout of a `Begin`. Raise `CallRefused` if the request does not fit the job."""
    check_job(job, request.job)
    if request.group >= len(job.dp_groups):
        raise CallRefused(f"no DP group {request.group}: job {job.job} has {len(job.dp_groups)}")
    if request.incarnation > 255:
        raise CallRefused(f"incarnation {request.incarnation}: must be a number from 0 to 255")
    if not 0 <= request.first_iteration <= request.next_iteration:
        raise CallRefused(
            f"first iteration {request.first_iteration}, next {request.next_iteration}: neither may be "
            "negative, nor the next below the first"
        )
    ranks = len(job.dp_groups[request.group].ranks)
    if request.ranks != ranks:
        raise CallRefused(f"{request.ranks} ranks: DP group {request.group} of job {job.job} has {ranks}")
    try:
        layout = from_json(request.layout)
    except LayoutError as error:
        raise CallRefused(str(error)) from None
    if request.optimizer.name not in SUPPORTED:
        raise CallRefused(f"unsupported optimizer: {request.optimizer.name or '(unnamed)'}")
    shards = job.shards(request.group)
    if layout.shards != shards:
        raise CallRefused(
            f"a layout of {layout.shards} shards: DP group {request.group} of job {job.job} has {shards}; "
            "trainers and shadow nodes must read the same job file"
        )
    return layout


def check_job(job: Job, name: str) -> None:
    """Raise `CallRefused` if a call is for another job."""
    if name != job.job:
        raise CallRefused(f"job {name or '(unnamed)'}: this node belongs to job {job.job}")


def in_start(
    group: ShadowGroup | None, number: int, said: pb.RecordPart | pb.SeedHeader | pb.PartsHeld
) -> ShadowGroup:
    """Return a group that has begun in the same start as `said`. Raise `CallRefused` if it has not.

    Neither number is unique: incarnations wrap after 256 starts, and a run continues over restarts.
    """
    if group is None or group.begin.incarnation != said.incarnation:
        others = "none" if group is None else f"incarnation {group.begin.incarnation}"
        raise CallRefused(
            f"DP group {number} has not begun incarnation {said.incarnation} here; {others} has",
            precondition=True,
        )
    begin = group.begin
    if begin.run != said.run:
        raise CallRefused(
            f"run {said.run or '(unnamed)'}: DP group {number} is in run {begin.run} here, in the same "
            f"incarnation {said.incarnation}",
            precondition=True,
        )
    if begin.start != said.start:
        if not (begin.start and said.start):
            raise CallRefused(
                f"DP group {number} has trainers of another version of Checkmate: some of their calls "
                "lack the start of training; install the same version on all hosts",
                precondition=True,
            )
        raise CallRefused(
            f"DP group {number} is in another start of training here, with the same incarnation "
            f"{said.incarnation} and run {said.run}",
            precondition=True,
        )
    return group


def warnings(request: pb.BeginRequest) -> list[str]:
    """Return warnings about differences in software that may change the last bits of the state."""
    ours = {"torch": torch.__version__, "CPU capability": torch.backends.cpu.get_cpu_capability()}
    theirs = {"torch": request.torch, "CPU capability": request.capability}
    found = [
        f"trainers have {what} {theirs[what]}, this node {ours[what]}: states may differ in the last bits"
        for what in ours
        if theirs[what] and theirs[what] != ours[what]
    ]
    if request.device.startswith("cuda"):
        found.append("trainers step on a GPU: states agree to about eight decimals, not bit for bit")
    return found


def reusable(old: ShadowGroup | None, request: pb.BeginRequest, layout: Layout) -> Sequence[HoldState]:
    """Return settled holds that continue in the new start: of the same run, layout, step and iteration."""
    if old is None or not request.keep:
        return ()
    same = old.layout.fingerprint == layout.fingerprint and old.begin.run == request.run
    if not same or not steps_alike(old.begin.optimizer, request.optimizer):
        return ()
    last = request.first_iteration - 1
    good = [hold for hold in old.holds if hold.settled and hold.seeded and not hold.doubtful]
    return [hold for hold in good if hold.stepped == last]
