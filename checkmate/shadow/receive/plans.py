"""What a shadow node holds, and the streams that bring it: from the job and the node's own id.

Pure (design, sections 1, 3 and 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkmate.job import boundaries
from checkmate.job.schema import Job
from checkmate.wire.schedule import StreamLayout
from checkmate.wire.tag import MODULUS, Hello

FARTHEST = MODULUS // 2
"""Positions so many bytes apart or more can't be told by 32 bits: what is missing is lost."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """One stream of a hold. `nic` is the index of our NIC that connects it, `stub` its address and port."""

    group: int
    shard: int
    side: int
    channel: int
    nic: int
    nic_ip: str
    stub: tuple[str, int]

    @property
    def boundary(self) -> int:
        """The boundary's id within the job, which the hello carries."""
        return 2 * self.group + self.side

    def hello(self, position: int, incarnation: int) -> Hello:
        """What opens it at byte `position` (64 bits) of the stream."""
        return Hello(position % MODULUS, self.boundary, self.shard, self.channel, incarnation)

    def __str__(self) -> str:
        side = ("first", "last")[self.side]
        return f"group {self.group}, shard {self.shard}, {side} rank, channel {self.channel}"


@dataclass(frozen=True, slots=True)
class HoldPlan:
    """One shard of one DP group that the node holds; `others` are its other holders' ids."""

    group: int
    shard: int
    others: tuple[int, ...]
    streams: tuple[StreamPlan, ...]


def hold_plans(job: Job, node_id: int) -> tuple[HoldPlan, ...]:
    """All holds of a node, by group and shard. `KeyError` where the job has no such node."""
    node = job.node(node_id)
    nics = [nic.ip for nic in node.nics]
    stubs = {s.name: (str(s.stub.ip), s.stub.port) for s in job.fabric.switches}
    of_hold: dict[tuple[int, int], list[StreamPlan]] = {}
    holders: dict[tuple[int, int], set[int]] = {}
    for stream in boundaries.streams(job):
        key = (stream.boundary.group, stream.shadow_id)
        holders.setdefault(key, set()).add(stream.node.id)
        if stream.node.id == node_id:
            plan = StreamPlan(
                group=stream.boundary.group,
                shard=stream.shadow_id,
                side=stream.boundary.side,
                channel=stream.channel,
                nic=nics.index(stream.nic.ip),
                nic_ip=str(stream.nic.ip),
                stub=stubs[stream.boundary.switch],
            )
            of_hold.setdefault(key, []).append(plan)
    return tuple(
        HoldPlan(group, shard, tuple(sorted(holders[group, shard] - {node_id})), tuple(plans))
        for (group, shard), plans in sorted(of_hold.items())
    )


class StreamTooLong(ValueError):
    """An iteration of a stream is too long for its 32-bit positions."""


def check_lengths(layouts: Sequence[StreamLayout]) -> None:
    """`StreamTooLong` where a receiver couldn't tell what is missing from what has come."""
    longest = max((layout.nbytes for layout in layouts), default=0)
    if longest >= FARTHEST:
        raise StreamTooLong(
            f"an iteration of one stream has {longest} bytes; it must have less than {FARTHEST}: "
            "use more channels, or more shards"
        )


def start_of(layout: StreamLayout, first: int, iteration: int) -> int:
    """The byte of a stream at which `iteration` starts; byte 0 belongs to iteration `first`."""
    return layout.nbytes * (iteration - first)


def whole_through(layout: StreamLayout, first: int, position: int) -> int | None:
    """The last iteration whose bytes all stand before `position`; `None` where the stream never has any."""
    return first + position // layout.nbytes - 1 if layout.nbytes else None


def ahead_at_most(layouts: Sequence[StreamLayout]) -> int:
    """How many iterations ahead streams may be joined: bytes less than 2 GB before the base are dropped."""
    longest = max((layout.nbytes for layout in layouts), default=0)
    return max(1, (FARTHEST - 1) // longest) if longest else MODULUS
