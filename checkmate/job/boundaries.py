"""Boundaries of DP groups, and the streams of their shards (design, sections 1, 3).

Pure, from a checked job. The control plane installs these streams; each shadow node connects its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

from checkmate.job.schema import Job, Nic, Rank, ShadowNode
from checkmate.wire.schedule import nic_of

AddressPair = tuple[IPv4Address, IPv4Address]
"""Source and destination."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """One of a DP group's two tagging ranks: `side` 0 (first) or 1 (last)."""

    job: str
    group: int
    side: int
    source: Rank
    destination: Rank
    first_id: int = 0
    """The shadow id of the group's shard 0 on the wire."""

    @property
    def number(self) -> int:
        """Its id within the job, which the hello carries."""
        return 2 * self.group + self.side

    @property
    def pair(self) -> AddressPair:
        """Source and destination address of its segments, which other groups' boundaries may have, too."""
        return self.source.ip, self.destination.ip

    @property
    def switch(self) -> str:
        """The boundary rank's own switch: the only one that replicates for it."""
        return self.source.switch


@dataclass(frozen=True, slots=True)
class Stream:
    """A TCP connection that a job has: (boundary, channel, shadow id, holder)."""

    boundary: Boundary
    channel: int
    shadow_id: int
    """As in the tag: the shard's number after the group's first shadow id."""
    replication_id: int
    node: ShadowNode
    nic: Nic

    @property
    def shard(self) -> int:
        """The shard of the group's model."""
        return self.shadow_id - self.boundary.first_id


def boundaries(job: Job) -> Iterator[Boundary]:
    """Yield the first and last rank of each DP group, with the rank to which each sends."""
    for index, (first_id, sides) in enumerate(zip(first_shadow_ids(job), _sides(job), strict=True)):
        for side, (source, destination) in enumerate(sides):
            yield Boundary(job.job, index, side, source, destination, first_id)


def first_shadow_ids(job: Job) -> tuple[int, ...]:
    """Return the shadow id on the wire of each DP group's shard 0; those of its other shards follow it.

    Groups whose boundaries have the same pair of addresses get ids one after another, so that addresses and
    shadow id identify a boundary. All others begin with 0.
    """
    free: dict[AddressPair, int] = {}
    connections = []
    for index, sides in enumerate(_sides(job)):
        pairs = [(source.ip, destination.ip) for source, destination in sides]
        connections.append(max(free.get(pair, 0) for pair in pairs))
        free |= dict.fromkeys(pairs, connections[-1] + job.shards(index))
    return tuple(connections)


def _sides(job: Job) -> Iterator[tuple[tuple[Rank, Rank], tuple[Rank, Rank]]]:
    """Yield each group's two hops whose sender tags, side 0 (first) and side 1 (last)."""
    for group in job.dp_groups:
        yield (group.ranks[0], group.ranks[1]), (group.ranks[-1], group.ranks[0])


def streams(job: Job) -> Iterator[Stream]:
    """Yield every stream of a job."""
    for boundary in boundaries(job):
        for shard in range(job.shards(boundary.group)):
            for replication_id in range(1, job.replicas + 1):
                node = job.holder(boundary.group, shard, replication_id)
                for channel in range(job.channels):
                    nic = node.nics[nic_of(channel, boundary.side, len(node.nics))]
                    shadow_id = boundary.first_id + shard
                    yield Stream(boundary, channel, shadow_id, replication_id, node, nic)
