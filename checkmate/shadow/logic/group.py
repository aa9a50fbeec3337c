"""A DP group on a node: the checked `Begin` request, its step records and its holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from checkmate.job.schema import Job
from checkmate.nodes.other_ranks import job_ranks, ranks_digest
from checkmate.optim.supported import steps_alike
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.hold import Hold
from checkmate.shadow.logic.records import Records
from checkmate.wire.layout import Layout


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


def source_of(begin: pb.BeginRequest, iteration: int) -> bytes:
    """Return the start to which a group's state after an iteration belongs."""
    return begin.start if iteration >= begin.first_iteration else begin.continues


@dataclass
class ShadowGroup:
    """One incarnation of a DP group."""

    begin: pb.BeginRequest
    layout: Layout
    records: Records
    holds: list[Hold] = field(default_factory=list)
    reached: int = 0
    """The newest iteration of the trainers when they last connected."""
    rank_progress: dict[int, pb.RankProgress] = field(default_factory=dict)
    """What ranks have said of themselves, by position."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Reasons, by shard, why a restart dropped the hold; kept until the next `Begin`."""

    def reach(self, iteration: int) -> None:
        """Note that trainers have connected at this iteration."""
        self.reached = max(self.reached, iteration)

    def note(self, part: pb.RecordPart) -> None:
        """Take from a part what its rank says of itself, which is not kept with the part."""
        if part.HasField("progress"):
            progress = pb.RankProgress.FromString(part.progress.SerializeToString())
            self.rank_progress[part.position] = progress
            if progress.HasField("repairs_from"):
                self.records.repairs_from[part.position] = progress.repairs_from
            else:  # it can't any more
                self.records.repairs_from.pop(part.position, None)
            part.ClearField("progress")

    @property
    def trained(self) -> int:
        """The newest iteration that a rank is known to have trained; -1: none."""
        return max([self.records.newest, *(progress.trained for progress in self.rank_progress.values())])

    @property
    def waited(self) -> float:
        """Seconds that steps waited for this node, on the rank whose steps waited longest."""
        return max((progress.waited_seconds for progress in self.rank_progress.values()), default=0.0)

    def remove(self, hold: Hold, why: str) -> None:
        """Remove a hold. Keep the reason if a restart loses something with it."""
        self.holds.remove(hold)
        if hold.holds_something:
            self.dropped[hold.plan.shard] = why

    @property
    def newest(self) -> int:
        """The newest iteration that the trainers are known to have reached."""
        iterations = [hold.receiving for hold in self.holds]
        return max([self.records.newest + 1, self.begin.next_iteration, self.reached, *iterations])

    def hold(self, shard: int) -> Hold:
        """Return a shard's hold. Raise `CallRefused` if the node has none."""
        for hold in self.holds:
            if hold.plan.shard == shard:
                return hold
        raise CallRefused(f"this node does not hold shard {shard} of group {self.begin.group}")


@dataclass(frozen=True)
class Former:
    """The groups of a node's job as it was before its ranks changed. Their holds are settled."""

    job: Job
    groups: dict[int, ShadowGroup]

    @property
    def digest(self) -> bytes:
        """What names its ranks (`other_ranks`)."""
        return ranks_digest(job_ranks(self.job))

    @property
    def holds(self) -> list[Hold]:
        """All holds, by group."""
        return [hold for group in self.groups.values() for hold in group.holds]


def check_job(job: Job, name: str) -> None:
    """Raise `CallRefused` if a call is for another job."""
    if name != job.job:
        raise CallRefused(f"job {name or '(unnamed)'}: this node belongs to job {job.job}")


def in_start(
    group: ShadowGroup | None, number: int, message: pb.RecordPart | pb.SeedHeader | pb.PartsHeld
) -> ShadowGroup:
    """Return a group that has begun in the same start as `message`. Raise `CallRefused` if it has not.

    Neither number is unique: incarnations wrap after 256 starts, and a run continues over restarts.
    """
    if group is None or group.begin.incarnation != message.incarnation:
        present = "none" if group is None else f"incarnation {group.begin.incarnation}"
        raise CallRefused(
            f"DP group {number} has not begun incarnation {message.incarnation} here; {present} has",
            precondition=True,
        )
    begin = group.begin
    if begin.run != message.run:
        raise CallRefused(
            f"run {message.run or '(unnamed)'}: DP group {number} is in run {begin.run} here, in the same "
            f"incarnation {message.incarnation}",
            precondition=True,
        )
    if begin.start != message.start:
        raise CallRefused(
            f"DP group {number} is in another start of training here, with the same incarnation "
            f"{message.incarnation} and run {message.run}",
            precondition=True,
        )
    return group


def warnings(request: pb.BeginRequest, *, exact: bool) -> list[str]:
    """Return warnings about differences in software that may change the last bits of the state.

    `exact`: whether the node's steps give the bits of the trainers' device.
    """
    if (request.device.startswith("cuda") and exact) or request.optimizer.copied:
        return []  # by the step kernel, whatever this node's PyTorch does, or without any step
    node_software = {"torch": torch.__version__, "CPU capability": torch.backends.cpu.get_cpu_capability()}
    trainer_software = {"torch": request.torch, "CPU capability": request.capability}
    lines = [
        f"trainers have {name} {version}, this node {node_software[name]}: states may differ in the last bits"
        for name, version in trainer_software.items()
        if version and version != node_software[name]
    ]
    if not exact:
        lines.append(
            f"the steps of trainers ({request.device}, torch {request.torch}) are repeated to about seven "
            "digits, not bit for bit (`checkmate docs training`, *Bits on a GPU*)"
        )
    return lines


def reusable(old: ShadowGroup | None, request: pb.BeginRequest, layout: Layout) -> Sequence[Hold]:
    """Return settled holds with exactly the state that a new start continues, and its layout and step."""
    if old is None or not request.keep:
        return ()
    last = request.first_iteration - 1
    present, continued = (old.begin.run, source_of(old.begin, last)), (request.run, request.continues)
    same = old.layout.fingerprint == layout.fingerprint and present == continued
    same &= (old.begin.device, old.begin.torch) == (request.device, request.torch)
    if not same or not steps_alike(old.begin.optimizer, request.optimizer):
        return ()
    good = [hold for hold in old.holds if hold.settled and hold.seeded and not hold.doubtful]
    return [hold for hold in good if hold.stepped == last]
