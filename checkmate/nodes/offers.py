"""Selects the shadow nodes to read a job's newest iteration from, during training or after it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from checkmate.job.schema import Job
from checkmate.nodes.standing import (
    Answers,
    Beginning,
    Shard,
    Standing,
    Standings,
    all_able,
    decide,
    most_complete,
    stranger,
    unfit,
)
from checkmate.rpc import shadow_pb2 as pb

LAB_HINT: Final = "a lab's shadow nodes can be reached from its controller namespace only"
"""Part of messages about `NoAnswer`."""


@dataclass(frozen=True)
class Source:
    """A start of training, and the nodes that offer each of its shards."""

    beginning: Beginning
    stepped: int
    """The newest iteration that any of them has stepped."""
    holders: Mapping[Shard, tuple[int, ...]]
    fenced: frozenset[int] = frozenset()
    """Nodes that a restart has stopped. They serve their current iteration, without a reservation."""
    ended: bool = False
    """Whether training is complete: no iteration follows `stepped`."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """All holders, each once."""
        return tuple(sorted({node for nodes in self.holders.values() for node in nodes}))


def find_source(job: Job, answers: Answers) -> Source:
    """Return the nodes that offer the shards of the newest start of training.

    A shard that no node offers is read from nodes that lack only buffers, because nodes of other shards may
    have them: the caller checks that all are there.

    Raises:
        Lacking: Some shard is not available.
        NoAnswer: No node answers.
    """
    fenced = frozenset(node for node, a in answers.items() if isinstance(a, pb.NodeStatus) and a.fenced)
    return decide(job, answers, lambda stood, beginning: _source(job, stood, beginning, fenced))


def _source(job: Job, stood: Standings, beginning: Beginning, fenced: frozenset[int]) -> Source:
    able = all_able(job, stood, lambda one: _trouble(one, beginning))
    holders = {shard: most_complete(found) for shard, found in able.items()}
    offered = [
        one.hold
        for shard, found in able.items()
        for one in found
        if one.hold is not None and one.node in holders[shard]
    ]
    stepped = max(hold.stepped for hold in offered)
    ended = all(hold.last and hold.stepped == stepped for hold in offered)
    return Source(beginning, stepped, holders, fenced, ended)


def _trouble(standing: Standing, beginning: Beginning) -> str:
    """Return why a node can't provide a shard, or ""."""
    hold = standing.hold
    if hold is None:
        return standing.trouble
    found = stranger(hold, beginning) or unfit(hold)
    if found or hold.offered or (hold.live and hold.lacks_buffers):
        return found
    return hold.trouble or f"is not live yet, at iteration {hold.stepped}"
