"""Boundaries of DP groups, and the streams of their shards (design, sections 1, 3).

Pure, from a checked job. The control plane installs these streams; each shadow node connects its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checkmate.job.schema import Job, Nic, Rank, ShadowNode
from checkmate.wire.schedule import FIRST, LAST, nic_of


@dataclass(frozen=True, slots=True)
class Boundary:
    """One of a DP group's two tagging ranks: `side` 0 (first) or 1 (last)."""

    job: str
    group: int
    side: int
    source: Rank
    destination: Rank

    @property
    def number(self) -> int:
        """Its id within the job, which the hello carries."""
        return 2 * self.group + self.side

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
    replication_id: int
    node: ShadowNode
    nic: Nic


def boundaries(job: Job) -> Iterator[Boundary]:
    """Yield the first and last rank of each DP group, with the rank to which each sends."""
    for index, group in enumerate(job.dp_groups):
        ranks = group.ranks
        yield Boundary(job.job, index, FIRST, ranks[0], ranks[1])
        yield Boundary(job.job, index, LAST, ranks[-1], ranks[0])


def streams(job: Job) -> Iterator[Stream]:
    """Yield every stream of a job."""
    for boundary in boundaries(job):
        for shadow_id in range(job.shards(boundary.group)):
            for replication_id in range(1, job.replicas + 1):
                node = job.holder(boundary.group, shadow_id, replication_id)
                for channel in range(job.channels):
                    nic = node.nics[nic_of(channel, boundary.side, len(node.nics))]
                    yield Stream(boundary, channel, shadow_id, replication_id, node, nic)
