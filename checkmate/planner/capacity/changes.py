"""Variants of a job that may fit. Pure.

These jobs are for planning only: added nodes and NICs have the addresses of those from which they are copied.
"""

from __future__ import annotations

from collections.abc import Callable

from checkmate.job.schema import Job
from checkmate.wire.tag import SHADOW_IDS_MAX
from checkmate.wording import counted


def widened(job: Job, node: int, more: int) -> Job:
    """Return the job with `more` shadow nodes like `node`, in every DP group that it serves."""
    like = job.node(node)
    free = max(one.id for one in job.shadow_nodes) + 1
    new = tuple(like.model_copy(update={"id": free + i}) for i in range(more))
    ids = tuple(one.id for one in new)
    groups = []
    for index, group in enumerate(job.dp_groups):
        there = job.shadow_list(index)
        groups.append(group.model_copy(update={"shadow_nodes": there + (ids if node in there else ())}))
    return job.model_copy(update={"shadow_nodes": job.shadow_nodes + new, "dp_groups": tuple(groups)})


def fewest_more_nodes(job: Job, node: int, fits: Callable[[Job], bool]) -> list[str]:
    """Return `3 more shadow nodes like it`, with the smallest number that fits, or nothing."""
    groups = [g for g in range(len(job.dp_groups)) if node in job.shadow_list(g)]
    most = SHADOW_IDS_MAX - max(job.shards(group) for group in groups)
    for more in range(1, most + 1):
        if fits(widened(job, node, more)):
            return [f"{counted(more, 'more shadow node')} like it"]
    return []


def with_nic(job: Job, node: int) -> Job:
    """Return the job with a second NIC, like its first, on a node."""
    nodes = (
        one.model_copy(update={"nics": (one.nics[0], one.nics[0].model_copy(update={"port": -1}))})
        if one.id == node
        else one
        for one in job.shadow_nodes
    )
    return job.model_copy(update={"shadow_nodes": tuple(nodes)})


def serving(job: Job, node: int, groups: int) -> Job:
    """Return the job with a node in at most `groups` DP groups."""
    made, left = [], groups
    for index, group in enumerate(job.dp_groups):
        nodes = job.shadow_list(index)
        if node in nodes:
            nodes = nodes if left > 0 else tuple(n for n in nodes if n != node)
            left -= 1
        others = nodes or tuple(n.id for n in job.shadow_nodes if n.id != node)
        made.append(group.model_copy(update={"shadow_nodes": others or (node,)}))
    return job.model_copy(update={"dp_groups": tuple(made)})
