"""Copies by hosts, as far as a job file tells: who sends what to whom. Pure.

Shards are taken to be of equal size; `part_demand` has those of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from checkmate.job.schema import Job, ShadowNode


@dataclass(frozen=True)
class NodePlan:
    """What comes to a shadow node: its shards, by group and number, and the ranks that send parts of them."""

    node: ShadowNode
    shards: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    streams: int
    """Connections: one for each shard and rank that has a part of it."""


def rank_share(job: Job, group: int) -> Fraction:
    """Return what each rank of a DP group sends in an iteration, as a share of its reduced gradients."""
    return Fraction(job.replicas, len(job.dp_groups[group].ranks))


def senders(ranks: int, shard: int, shards: int) -> range:
    """Return the positions of the ranks whose parts overlap a shard."""
    return range(shard * ranks // shards, -(-(shard + 1) * ranks // shards))


def node_plans(job: Job) -> Iterator[NodePlan]:
    """Yield each shadow node with at least one shard."""
    shards: dict[int, list[tuple[int, int]]] = {node.id: [] for node in job.shadow_nodes}
    for group in job.groups:
        for shard in range(job.shards(group)):
            for replica in range(1, job.replicas + 1):
                shards[job.holder(group, shard, replica).id].append((group, shard))
    for node in job.shadow_nodes:
        own_shards = tuple(sorted(shards[node.id]))
        streams = [
            job.dp_groups[group].ranks[position].rank
            for group, shard in own_shards
            for position in senders(len(job.dp_groups[group].ranks), shard, job.shards(group))
        ]
        if own_shards:
            yield NodePlan(node, own_shards, tuple(sorted(set(streams))), len(streams))
