"""A job's shards, the nodes that should hold them, and their names in messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from checkmate.job.schema import Job

Shard = tuple[int, int]
"""A DP group's index, and a shadow id in it."""


def holders_of(job: Job) -> dict[Shard, tuple[int, ...]]:
    """Return each shard of a job and the ids of the nodes that should hold it, in order."""
    return {
        (group, shard): tuple(job.holder(group, shard, i + 1).id for i in range(job.replicas))
        for group in range(len(job.dp_groups))
        for shard in range(job.shards(group))
    }


def name(shard: Shard) -> str:
    """Return a shard's name in messages: `shard 0 of DP group 1`."""
    return f"shard {shard[1]} of DP group {shard[0]}"


def names(shards: Iterable[Shard]) -> str:
    """Return the names of shards in messages: `shard 0 of DP group 1, ...`."""
    return ", ".join(map(name, shards))


def node_name(job: Job, node: int) -> str:
    """Return a node's name in messages: `shadow node 0 (10.0.0.1:7000)`."""
    return f"shadow node {node} ({job.node(node).mgmt})"
