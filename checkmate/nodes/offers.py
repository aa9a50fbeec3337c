"""Which shadow nodes offer a job's newest iteration, to be read while training goes on or after it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from checkmate.job.schema import Job
from checkmate.nodes.shards import Shard
from checkmate.nodes.standing import (
    Answers,
    Beginning,
    Standing,
    Standings,
    all_able,
    decide,
    most_complete,
    stranger,
    unfit,
)
from checkmate.rpc import shadow_pb2 as pb

LAB_HINT: Final = "a lab's shadow nodes are reached from its namespace of the controller only"
"""Told with `NoAnswer`."""


@dataclass(frozen=True)
class Source:
    """A start of training, and the nodes that offer each of its shards."""

    beginning: Beginning
    stepped: int
    """The newest iteration that any of them has stepped."""
    holders: Mapping[Shard, tuple[int, ...]]
    fenced: frozenset[int] = frozenset()
    """Nodes that a restart has stopped: they serve the iteration at which they are, without a reservation."""
    ended: bool = False
    """Whether training has come to its end: no iteration follows `stepped`."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """All of them, each once."""
        return tuple(sorted({node for nodes in self.holders.values() for node in nodes}))


def find_source(job: Job, answers: Answers) -> Source:
    """Return who offers the shards of the newest start of training. `Lacking`, `NoAnswer`.

    A shard that nobody offers is had from nodes that lack nothing but buffers, which those of other shards
    may have: the caller sees to it that all are there.
    """
    fenced = frozenset(node for node, a in answers.items() if isinstance(a, pb.NodeStatus) and a.fenced)
    return decide(job, answers, lambda stood, beginning: _source(job, stood, beginning, fenced))


def _source(job: Job, stood: Standings, beginning: Beginning, fenced: frozenset[int]) -> Source:
    able = all_able(job, stood, lambda one: _trouble(one, beginning))
    holders = {shard: most_complete(found) for shard, found in able.items()}
    offered = [hold for shard, found in able.items() for hold in _holds(found, holders[shard])]
    stepped = max(hold.stepped for hold in offered)
    ended = all(hold.last and hold.stepped == stepped for hold in offered)
    return Source(beginning, stepped, holders, fenced, ended)


def _holds(found: Sequence[Standing], nodes: Sequence[int]) -> list[pb.HoldStatus]:
    """Return the holds of some of the nodes."""
    return [one.hold for one in found if one.hold is not None and one.node in nodes]


def _trouble(standing: Standing, beginning: Beginning) -> str:
    """Return why a node can't give a shard; empty if it can."""
    hold = standing.hold
    if hold is None:
        return standing.trouble
    return stranger(hold, beginning) or unfit(hold) or _not_live(hold)


def _not_live(hold: pb.HoldStatus) -> str:
    if hold.offered or (hold.live and hold.lacks_buffers):
        return ""
    return hold.trouble or f"is not live yet, at iteration {hold.stepped}"
