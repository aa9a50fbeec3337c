"""Which shadow nodes can give a job's checkpoint, and of which run. Pure, from what their `Status` says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from checkmate.rpc import shadow_pb2 as pb
from checkmate.schema import Job

Shard = tuple[int, int]
"""A DP group's index, and a shadow id in it."""

INCARNATIONS = 256
LAB_HINT = "a lab's shadow nodes are reached from its namespace of the controller only"
"""Told with `NoAnswer`."""


@dataclass(frozen=True)
class Source:
    """A run, and the nodes that offer each of its shards."""

    run: str
    incarnation: int
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


@dataclass
class Lacking(Exception):
    """No checkpoint can be had: for each shard that stands in the way, what each of its holders says."""

    shards: dict[Shard, list[str]] = field(default_factory=dict)
    wrong: frozenset[Shard] = frozenset()
    """Of these, shards that are there and no good: that doesn't pass as nodes are started and seeded."""

    def __str__(self) -> str:
        return "; ".join(
            f"{name(shard)}: {', '.join(troubles) or 'nobody holds it'}"
            for shard, troubles in sorted(self.shards.items())
        )


@dataclass
class NoAnswer(Lacking):
    """No shadow node answers at all."""


def name(shard: Shard) -> str:
    """`shard 0 of DP group 1`"""
    return f"shard {shard[1]} of DP group {shard[0]}"


def holders_of(job: Job) -> dict[Shard, tuple[int, ...]]:
    """Each shard of a job, and the nodes that should hold it, in order."""
    return {
        (group, shard): tuple(job.holder(group, shard, i + 1).id for i in range(job.replicas))
        for group in range(len(job.dp_groups))
        for shard in range(job.shards(group))
    }


def choose(job: Job, answers: Mapping[int, pb.NodeStatus | str]) -> Source:
    """The newest incarnation's run, and who offers its shards. `answers`: by node; a text where it gave none.

    A shard that nobody offers is had from nodes that lack nothing but buffers, which those of other shards
    may have: see to it that all are there. `Lacking` where there is no such node either.
    """
    holds = {
        (node, (hold.shard.group, hold.shard.shard)): hold
        for node, answer in answers.items()
        if isinstance(answer, pb.NodeStatus)
        for hold in answer.holds
    }
    newest = newest_incarnation(hold.incarnation for hold in holds.values())
    begun = [hold for hold in holds.values() if hold.incarnation == newest]
    run = begun[0].run if begun else ""
    found: dict[Shard, tuple[int, ...]] = {}
    lacking: dict[Shard, list[str]] = {}
    wrong: set[Shard] = set()
    for shard, nodes in holders_of(job).items():
        troubles = {node: _trouble(answers[node], holds.get((node, shard)), newest, run) for node in nodes}
        able = [node for node in nodes if troubles[node] is None]
        whole = [node for node in able if not holds[node, shard].lacks_buffers]
        found[shard] = tuple(whole or able)
        if not found[shard]:
            lacking[shard] = [f"{_address(job, node)}: {text}" for node, text in troubles.items()]
            doubtful = [hold for node in nodes if (hold := holds.get((node, shard))) and hold.doubtful]
            if {hold.trouble for hold in doubtful} & set(troubles.values()):
                wrong.add(shard)
    if all(isinstance(answer, str) for answer in answers.values()):
        raise NoAnswer(lacking)
    if lacking or newest is None:
        raise Lacking(lacking, frozenset(wrong))
    offered = [holds[node, shard] for shard, nodes in found.items() for node in nodes]
    fenced = frozenset(node for node, a in answers.items() if isinstance(a, pb.NodeStatus) and a.fenced)
    stepped = max(hold.stepped for hold in offered)
    ended = all(hold.last and hold.stepped == stepped for hold in offered)
    return Source(run, newest, stepped, found, fenced, ended)


def newest_incarnation(incarnations: Iterable[int]) -> int | None:
    """The newest of some, which count mod 256: the one that none is less than 128 ahead of (RFC 1982)."""
    seen = sorted(set(incarnations))
    ahead = {i: sum(0 < (other - i) % INCARNATIONS < INCARNATIONS // 2 for other in seen) for i in seen}
    return min(seen, key=lambda i: ahead[i], default=None)


def lacking(
    job: Job, troubles: Mapping[Shard, Sequence[tuple[int, str]]], wrong: Iterable[Shard] = ()
) -> Lacking:
    """`Lacking` from what nodes said of shards."""
    return Lacking(
        {
            shard: [f"{_address(job, node)}: {text}" for node, text in said]
            for shard, said in troubles.items()
        },
        frozenset(wrong),
    )


def _address(job: Job, node: int) -> str:
    return f"shadow node {node} ({job.node(node).mgmt})"


def _trouble(
    answer: pb.NodeStatus | str, hold: pb.HoldStatus | None, newest: int | None, run: str
) -> str | None:
    """Why a node can't give a shard; `None` where it can."""
    if isinstance(answer, str):
        return answer
    if hold is None:
        return "holds nothing" if answer.holds_nothing or not answer.holds else "does not hold it"
    if (hold.incarnation, hold.run) != (newest, run):
        return f"is still in incarnation {hold.incarnation}, not {newest}"
    if hold.seeded and (hold.offered or (hold.live and hold.lacks_buffers and not hold.doubtful)):
        return None
    if hold.trouble:
        return hold.trouble
    return f"is not live yet, at iteration {hold.stepped}" if hold.seeded else "is not seeded yet"
