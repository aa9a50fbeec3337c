"""A job with a little more, or less, of something: what might make it fit. Pure.

The jobs made here are for planning only: added nodes and NICs share the addresses of those they are like.
"""

from __future__ import annotations

from collections.abc import Callable

from checkmate.job.schema import Job, ShadowNode
from checkmate.wire.tag import SHADOW_IDS_MAX


def widened(job: Job, node: int, more: int) -> Job:
    """The job with `more` shadow nodes like `node`, in every DP group that it serves."""
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
    """As words: `3 more shadow nodes like it`, the fewest that make it fit; nothing where none do."""
    groups = [g for g in range(len(job.dp_groups)) if node in job.shadow_list(g)]
    most = SHADOW_IDS_MAX - max(job.shards(group) for group in groups)
    for more in range(1, most + 1):
        if fits(widened(job, node, more)):
            return [f"{more} more shadow node{'s' if more > 1 else ''} like it"]
    return []


def with_nic(job: Job, node: int) -> Job:
    """The job where the node has a second NIC like its first."""
    nodes = (
        one.model_copy(update={"nics": (one.nics[0], one.nics[0].model_copy(update={"port": -1}))})
        if one.id == node
        else one
        for one in job.shadow_nodes
    )
    return job.model_copy(update={"shadow_nodes": tuple(nodes)})


def serving(job: Job, node: int, groups: int) -> Job:
    """The job where the node is in no more than so many DP groups."""
    made, left = [], groups
    for index, group in enumerate(job.dp_groups):
        nodes = job.shadow_list(index)
        if node in nodes:
            nodes = nodes if left > 0 else tuple(n for n in nodes if n != node)
            left -= 1
        others = nodes or tuple(n.id for n in job.shadow_nodes if n.id != node)
        made.append(group.model_copy(update={"shadow_nodes": others or (node,)}))
    return job.model_copy(update={"dp_groups": tuple(made)})


def place(job: Job, node: int) -> tuple[int, ShadowNode]:
    """Where a shadow node stands in the job's list, and the node."""
    return next((i, one) for i, one in enumerate(job.shadow_nodes) if one.id == node)
