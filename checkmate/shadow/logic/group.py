"""A DP group as a node takes part in it: what `Begin` said, checked; its records and its holds."""

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
    """A call that can't be carried out. `precondition`: it might be, in another state of the node."""

    def __init__(self, message: str, *, precondition: bool = False) -> None:
        super().__init__(message)
        self.precondition = precondition


Start = tuple[int, str, int, bytes]
"""A start of training: incarnation, run, first iteration, and what tells it from others of the same."""


def start_of(begin: pb.BeginRequest) -> Start:
    """The start of training that a `Begin` belongs to."""
    return (begin.incarnation, begin.run, begin.first_iteration, begin.start)


@dataclass
class ShadowGroup:
    """One incarnation of a DP group."""

    begin: pb.BeginRequest
    layout: Layout
    records: Records
    holds: list[HoldState] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    """Of shards whose holds a restart had no use for: why. What was held is not forgotten until `Begin`."""

    @property
    def newest(self) -> int:
        """The newest iteration that the trainers are known to be in."""
        seen = [hold.receiving for hold in self.holds]
        return max([self.records.newest + 1, self.begin.next_iteration, *seen])

    def hold(self, shard: int) -> HoldState:
        """A shard's hold; `CallRefused` where the node has none."""
        for hold in self.holds:
            if hold.plan.shard == shard:
                return hold
        raise CallRefused(f"this node does not hold shard {shard} of group {self.begin.group}")


def check_begin(job: Job, request: pb.BeginRequest) -> Layout:
    """The layout of a `Begin` that fits the job; `CallRefused` says what doesn't."""
    check_job(job, request.job)
    if request.group >= len(job.dp_groups):
        raise CallRefused(f"no DP group {request.group}: job {job.job} has {len(job.dp_groups)}")
    if request.incarnation > 255:
        raise CallRefused(f"incarnation {request.incarnation}: it is a number from 0 to 255")
    if not 0 <= request.first_iteration <= request.next_iteration:
        raise CallRefused(
            f"first iteration {request.first_iteration}, next {request.next_iteration}: neither is negative, "
            "and the next is not below the first"
        )
    ranks = len(job.dp_groups[request.group].ranks)
    if request.ranks != ranks:
        raise CallRefused(f"{request.ranks} ranks: DP group {request.group} of job {job.job} has {ranks}")
    try:
        layout = from_json(request.layout)
    except LayoutError as error:
        raise CallRefused(str(error)) from None
    if request.optimizer.name not in SUPPORTED:
        raise CallRefused(f"the optimizer can't be followed: {request.optimizer.name or 'none is named'}")
    shards = job.shards(request.group)
    if layout.shards != shards:
        raise CallRefused(
            f"a layout of {layout.shards} shards: DP group {request.group} of job {job.job} has {shards}; "
            "trainers and shadow nodes must read the same job file"
        )
    return layout


def check_job(job: Job, name: str) -> None:
    """`CallRefused` where a call is about another job."""
    if name != job.job:
        raise CallRefused(f"job {name or '(unnamed)'}: this node belongs to job {job.job}")


def in_start(
    group: ShadowGroup | None, number: int, said: pb.RecordPart | pb.SeedHeader | pb.PartsHeld
) -> ShadowGroup:
    """Return a group that has begun, in the start of training that is spoken of; else `CallRefused`."""
    if group is None:
        raise CallRefused(
            f"DP group {number} has not begun incarnation {said.incarnation} here; none has",
            precondition=True,
        )
    check_start(group.begin, said)
    return group


def check_start(begin: pb.BeginRequest, said: pb.RecordPart | pb.SeedHeader | pb.PartsHeld) -> None:
    """`CallRefused` where a record or seeds are of another start of training than their group's `Begin`.

    Incarnations come round after 256 starts, and a run goes on over restarts: one alone doesn't tell.
    """
    number = begin.group
    if begin.incarnation != said.incarnation:
        raise CallRefused(
            f"DP group {number} has not begun incarnation {said.incarnation} here; "
            f"incarnation {begin.incarnation} has",
            precondition=True,
        )
    if begin.run != said.run:
        raise CallRefused(
            f"run {said.run or '(unnamed)'}: DP group {number} is in run {begin.run} here, in the same "
            f"incarnation {said.incarnation}",
            precondition=True,
        )
    if begin.start != said.start:
        if not (begin.start and said.start):
            raise CallRefused(
                f"DP group {number} has trainers of another version of Checkmate: not all of their calls "
                "name the start of training; install one version on all hosts",
                precondition=True,
            )
        raise CallRefused(
            f"DP group {number} is in another start of training here, of the same incarnation "
            f"{said.incarnation} and run {said.run}",
            precondition=True,
        )


def warnings(request: pb.BeginRequest) -> list[str]:
    """How the trainers' software differs from ours, where that may cost the last bits."""
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
    """The earlier incarnation's holds that go on where they are: settled, `keep`, same run, layout, step."""
    if old is None or not request.keep:
        return ()
    same = old.layout.fingerprint == layout.fingerprint and old.begin.run == request.run
    if not same or not steps_alike(old.begin.optimizer, request.optimizer):
        return ()
    last = request.first_iteration - 1
    good = [hold for hold in old.holds if hold.settled and hold.seeded and not hold.doubtful]
    return [hold for hold in good if hold.stepped == last]
