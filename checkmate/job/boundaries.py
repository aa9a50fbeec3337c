"""Boundaries of DP groups, and the streams of their shards (design, sections 1, 3).

Pure, from a checked job. The control plane installs these streams; each shadow node connects its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

from checkmate.job.schema import Job, Nic, Rank, ShadowNode
from checkmate.wire.schedule import FIRST, LAST, RING_SLICING, Slicing, nic_of
from checkmate.wire.tree import TreeSlicing, tree_place

AddressPair = tuple[IPv4Address, IPv4Address]
"""Source and destination."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A hop on which one of a DP group's two tagging ranks sends: `side` 0 (first) or 1 (last)."""

    job: str
    number: int
    """Its id within the job, which the hello carries."""
    group: int
    side: int
    source: Rank
    destination: Rank
    channels: range
    """The channels in its tags: the ring's, or those after them, of the trees."""
    first_id: int = 0
    """The shadow id of the group's shard 0 on the wire."""

    @property
    def in_trees(self) -> bool:
        """Whether the hop is from a root to its child, rather than of the ring."""
        return self.channels.start > 0

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
    """Yield the hops of each DP group's first and last rank: in its ring, and in its trees, if it has any."""
    for group, (first_id, hops) in enumerate(zip(first_shadow_ids(job), _hops(job), strict=True)):
        for place, (source, destination) in enumerate(hops):
            in_trees, side = divmod(place, 2)
            number = 2 * (len(job.dp_groups) * in_trees + group) + side
            channels = range(job.channels * in_trees, job.channels * (1 + in_trees))
            yield Boundary(job.job, number, group, side, source, destination, channels, first_id)


def first_shadow_ids(job: Job) -> tuple[int, ...]:
    """Return the shadow id on the wire of each DP group's shard 0; those of its other shards follow it.

    Groups whose boundaries have the same pair of addresses get ids one after another, so that addresses and
    shadow id identify a boundary. All others begin with 0.
    """
    free: dict[AddressPair, int] = {}
    connections = []
    for index, hops in enumerate(_hops(job)):
        pairs = [(source.ip, destination.ip) for source, destination in hops]
        connections.append(max(free.get(pair, 0) for pair in pairs))
        free |= dict.fromkeys(pairs, connections[-1] + job.shards(index))
    return tuple(connections)


def _hops(job: Job) -> Iterator[list[tuple[Rank, Rank]]]:
    """Yield each group's hops whose sender tags: sides 0 and 1 of the ring, and of the trees."""
    for index, group in enumerate(job.dp_groups):
        ranks = group.ranks
        hops = [(ranks[0], ranks[1]), (ranks[-1], ranks[0])]
        if job.has_trees(index):
            for side, root in ((FIRST, 0), (LAST, len(ranks) - 1)):
                (child,) = tree_place(len(ranks), root, side).children
                hops.append((ranks[root], ranks[child]))
        yield hops


def slicing(job: Job, group: int) -> Slicing:
    """Return how a DP group's buckets are cut, in a job whose collective is ours."""
    if not job.has_trees(group):
        return RING_SLICING
    return TreeSlicing() if job.tree_bytes is None else TreeSlicing(job.tree_bytes)


def streams(job: Job) -> Iterator[Stream]:
    """Yield every stream of a job."""
    for boundary in boundaries(job):
        for shard in range(job.shards(boundary.group)):
            for replication_id in range(1, job.replicas + 1):
                node = job.holder(boundary.group, shard, replication_id)
                for channel in boundary.channels:
                    nic = node.nics[nic_of(channel, boundary.side, len(node.nics))]
                    shadow_id = boundary.first_id + shard
                    yield Stream(boundary, channel, shadow_id, replication_id, node, nic)
