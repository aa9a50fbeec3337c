"""A shadow node's holds and their streams, derived from the job and the node's id.

Pure (design, sections 1, 3 and 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkmate.job import boundaries
from checkmate.job.schema import Job
from checkmate.wire.schedule import FIRST, StreamLayout, StreamName
from checkmate.wire.tag import MODULUS, Hello

SETS = 2
"""Sets of a shard's buckets: one fills while the other is stepped."""
FARTHEST = MODULUS // 2
"""Positions at least this many bytes apart are ambiguous in 32 bits: missing bytes are lost."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """One stream of a hold: gradients of its shard that one rank sends."""

    group: int
    shard: int
    sender: int
    """The rank's position in the group."""
    channel: int

    @property
    def name(self) -> StreamName:
        """Its name within the group, by which records and repairs have it."""
        return StreamName(self.sender, self.channel, self.shard)

    def __str__(self) -> str:
        return f"group {self.group}, shard {self.shard}, rank at position {self.sender}"


@dataclass(frozen=True, slots=True)
class TaggedStreamPlan(StreamPlan):
    """A stream of copies by a switch. `nic` is the index of our NIC; `stub` the stub's address and port."""

    boundary: int
    """The boundary's id within the job, which the hello carries."""
    side: int
    nic: int
    nic_ip: str
    stub: tuple[str, int]
    shadow_id: int
    """The shard's number on the wire."""

    def hello(self, position: int, incarnation: int, time: int) -> Hello:
        """Return the hello that opens the stream at byte `position` (64 bits). `time`: in microseconds."""
        return Hello(position % MODULUS, self.boundary, self.shadow_id, self.channel, incarnation, time)

    def __str__(self) -> str:
        side = ("first", "last")[self.side]
        return f"group {self.group}, shard {self.shard}, {side} rank, channel {self.channel}"


@dataclass(frozen=True, slots=True)
class HoldPlan:
    """One shard of one DP group that the node holds. `other_holders` are the ids of its other holders."""

    group: int
    shard: int
    other_holders: tuple[int, ...]
    streams: tuple[StreamPlan, ...]

    @property
    def tagged_streams(self) -> tuple[TaggedStreamPlan, ...]:
        """Its streams of copies by a switch."""
        return tuple(stream for stream in self.streams if isinstance(stream, TaggedStreamPlan))


def hold_plans(job: Job, node_id: int) -> tuple[HoldPlan, ...]:
    """Return all holds of a node, by group and shard. Raise `KeyError` if the job has no such node."""
    if job.copies == "host":
        return _part_plans(job, node_id)
    node = job.node(node_id)
    nics = [nic.ip for nic in node.nics]
    stubs = {s.name: (str(s.stub.ip), s.stub.port) for s in job.fabric.switches}
    of_hold: dict[tuple[int, int], list[TaggedStreamPlan]] = {}
    for stream in boundaries.streams(job):
        if stream.node.id == node_id:
            plan = TaggedStreamPlan(
                group=stream.boundary.group,
                shard=stream.shard,
                boundary=stream.boundary.number,
                side=stream.boundary.side,
                sender=_position(job, stream.boundary),
                channel=stream.channel,
                nic=nics.index(stream.nic.ip),
                nic_ip=str(stream.nic.ip),
                stub=stubs[stream.boundary.switch],
                shadow_id=stream.shadow_id,
            )
            of_hold.setdefault((plan.group, plan.shard), []).append(plan)
    return tuple(
        HoldPlan(*key, _other_holders(job, *key, node_id), tuple(plans))
        for key, plans in sorted(of_hold.items())
    )


def _other_holders(job: Job, group: int, shard: int, node_id: int) -> tuple[int, ...]:
    """Return the ids of a shard's other holders."""
    return tuple(sorted(_holders(job, group, shard) - {node_id}))


def _holders(job: Job, group: int, shard: int) -> set[int]:
    return {job.holder(group, shard, replication_id).id for replication_id in range(1, job.replicas + 1)}


def _part_plans(job: Job, node_id: int) -> tuple[HoldPlan, ...]:
    """Return the holds of a node to which hosts send parts. A layout tells which ranks have bytes of one."""
    plans = []
    for number, group in enumerate(job.dp_groups):
        for shard in range(job.shards(number)):
            if node_id in _holders(job, number, shard):
                streams = tuple(StreamPlan(number, shard, sender, 0) for sender in range(len(group.ranks)))
                plans.append(HoldPlan(number, shard, _other_holders(job, number, shard, node_id), streams))
    if not plans:
        job.node(node_id)  # raises if there is none
    return tuple(plans)


def _position(job: Job, boundary: boundaries.Boundary) -> int:
    """Return a boundary rank's position in its ring."""
    return 0 if boundary.side == FIRST else len(job.dp_groups[boundary.group].ranks) - 1


def full_buffers(plans: Sequence[HoldPlan]) -> int:
    """Return how many receive buffers of a node may be full at once: one for each stream, one for records."""
    return sum(len(plan.streams) for plan in plans) + 1


class StreamTooLong(ValueError):
    """An iteration of a stream is too long for its 32-bit positions."""


def check_lengths(layouts: Sequence[StreamLayout]) -> None:
    """Raise `StreamTooLong` if a receiver could not tell missing bytes from received ones."""
    longest = max((layout.nbytes for layout in layouts), default=0)
    if longest >= FARTHEST:
        raise StreamTooLong(
            f"an iteration of one stream has {longest} bytes, but must have less than {FARTHEST}: "
            "use more channels, or more shards"
        )


def start_of(layout: StreamLayout, first: int, iteration: int) -> int:
    """Return the byte of a stream at which `iteration` starts. Byte 0 belongs to iteration `first`."""
    return layout.nbytes * (iteration - first)


def whole_through(layout: StreamLayout, first: int, position: int) -> int | None:
    """Return the last iteration that ends before `position`, or `None` if the stream never has data."""
    return first + position // layout.nbytes - 1 if layout.nbytes else None


def ahead_at_most(layouts: Sequence[StreamLayout]) -> int:
    """Return how many iterations ahead streams may be joined; the 2 GB before the base are dropped."""
    longest = max((layout.nbytes for layout in layouts), default=0)
    return max(1, (FARTHEST - 1) // longest) if longest else MODULUS
