"""Selects the iteration that a restart resumes from, and the nodes to read from. Pure (design, section 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from checkmate.base.wording import at_iteration
from checkmate.job.schema import Job
from checkmate.nodes.standing import (
    Answers,
    Beginning,
    Shard,
    Standing,
    Standings,
    all_able,
    beginning_of,
    decide,
    most_complete,
    newest_incarnation,
    standings,
    stranger,
    unfit,
    why_lacking,
)
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import INCARNATIONS


@dataclass(frozen=True)
class Target:
    """The iteration to settle at, its run, and the nodes that can reach it, by shard."""

    iteration: int
    run: str
    holders: Mapping[Shard, tuple[int, ...]]
    lacking: int = 0
    """Number of buffers that all these nodes lack so far, in the DP group that lacks most."""
    behind: int = 0
    """Number of later iterations that some node has stepped, but that not all shards can reach."""
    generation: int = 0
    start: bytes = b""
    """The start to which the state after that iteration belongs."""

    @property
    def complete(self) -> bool:
        """Whether further answers of nodes can't improve it."""
        return not (self.lacking or self.behind)


@dataclass(frozen=True)
class _Reach:
    """The iterations that a hold can be settled at: from `stepped` to `in_full`."""

    standing: Standing
    shard: Shard
    stepped: int
    in_full: int
    lacks_buffers: int


def next_incarnation(answers: Iterable[pb.NodeStatus], clock: float) -> int:
    """Return the incarnation after the newest that any node has seen, or the clock's seconds mod 256."""
    incarnations = [answer.incarnation for answer in answers if answer.discarded or not answer.holds_nothing]
    last = newest_incarnation(incarnations)
    return int(clock if last is None else last + 1) % INCARNATIONS


def find_target(job: Job, answers: Answers) -> Target:
    """Return the target of fenced nodes.

    Of the holds whose `in_full` is at least the largest `stepped`, it is the smallest `in_full`. So no
    stepped iteration is repeated, and as many holds as possible can be used. If some shard has no such hold,
    it is the newest iteration that all shards can be settled at.

    A hold counts if it is seeded, not doubtful, and of the newest start of training. It also counts if it is
    of exactly the start that the newest one continues, and can be settled at the iteration from which the
    newest one began. Of a shard's holders, those that lack buffers are left out if another one has all: ranks
    accept buffers from any shard.

    Raises:
        Lacking: The shards that no node can settle at a common iteration.
        NoAnswer: No node answers.
    """
    return decide(job, answers, lambda stood, beginning: _target(job, stood, beginning))


def _target(job: Job, stood: Standings, beginning: Beginning) -> Target:
    usable = [
        reach
        for shard, standings in stood.items()
        for standing in standings
        if (reach := _reach(standing, shard, beginning)) is not None
    ]
    stepped = max((hold.stepped for hold in usable), default=-1)
    able = [hold for hold in usable if hold.in_full >= stepped]
    without = _without(stood, able)
    if without:
        able = _newest_whole(stood, usable)
    if not able:
        lacking = {shard: stood[shard] for shard in without}
        raise why_lacking(job, lacking, lambda standing: _trouble(standing, beginning, stepped))
    iteration = min(hold.in_full for hold in able)
    behind = max(stepped - iteration, 0)
    holders = {
        shard: most_complete([reach.standing for reach in able if reach.shard == shard]) for shard in stood
    }
    lacks = _lacking_buffers(able)
    return Target(
        iteration,
        beginning.run,
        holders,
        lacks,
        behind,
        beginning.generation,
        beginning.source(iteration),
    )


def _without(shards: Iterable[Shard], holds: Iterable[_Reach]) -> list[Shard]:
    """Return the shards that are not among the holds."""
    return sorted(set(shards) - {hold.shard for hold in holds})


def _newest_whole(shards: Iterable[Shard], usable: Sequence[_Reach]) -> list[_Reach]:
    """Return the holds that can be settled at the newest iteration common to all shards, if there is one."""
    for iteration in sorted({hold.in_full for hold in usable}, reverse=True):
        able = [hold for hold in usable if hold.stepped <= iteration <= hold.in_full]
        if not _without(shards, able):
            return able
    return []


def _reach(standing: Standing, shard: Shard, beginning: Beginning) -> _Reach | None:
    """Return the iterations that a node's hold can be settled at, if any."""
    hold, origin = standing.hold, beginning.first_iteration - 1
    if hold is None or unfit(hold):
        return None
    if beginning_of(hold) == beginning:
        return _Reach(standing, shard, hold.stepped, hold.in_full, hold.lacks_buffers)
    if _continued(hold, beginning) and hold.stepped <= origin <= hold.in_full:
        return _Reach(standing, shard, hold.stepped, origin, hold.lacks_buffers)
    return None


def _continued(hold: pb.HoldStatus, beginning: Beginning) -> bool:
    """Return whether a hold's state before the newest start is what that start continues."""
    source = beginning_of(hold).source(beginning.first_iteration - 1)
    return hold.run == beginning.run and source == beginning.continues


def _lacking_buffers(holds: Sequence[_Reach]) -> int:
    """Return how many buffers even the most complete hold lacks, in the DP group that lacks most."""
    least: dict[int, int] = {}
    for hold in holds:
        lacks = hold.lacks_buffers if hold.stepped >= 0 else 0  # they come with records: there was none yet
        least[hold.shard[0]] = min(lacks, least.get(hold.shard[0], lacks))
    return max(least.values(), default=0)


def _trouble(standing: Standing, beginning: Beginning, stepped: int) -> str:
    """Return why a node's hold can't be settled at the same iteration as others."""
    hold = standing.hold
    if hold is None:
        return standing.trouble
    strange = stranger(hold, beginning)
    if strange and _continued(hold, beginning):
        strange = f"{strange}, which began at iteration {beginning.first_iteration}, and {_progress(hold)}"
    return strange or unfit(hold) or hold.trouble or f"{_progress(hold)}, but another has stepped {stepped}"


def _progress(hold: pb.HoldStatus) -> str:
    stepped = f"has stepped iteration {hold.stepped}" if hold.stepped >= 0 else "has stepped nothing"
    return f"{stepped} and has {hold.in_full if hold.in_full >= 0 else 'nothing'} in full"


def find_settled(job: Job, target: Target, answers: Answers) -> dict[Shard, list[int]]:
    """Return the nodes that hold the target now, by their answers to Settle.

    Raises:
        Lacking: No node holds some shard.
    """
    stood = {
        shard: [standing for standing in shard_standings if standing.node in target.holders[shard]]
        for shard, shard_standings in standings(job, answers).items()
    }
    able = all_able(job, stood, lambda standing: _unsettled(standing, target))
    return {shard: [standing.node for standing in shard_standings] for shard, shard_standings in able.items()}


def _unsettled(standing: Standing, target: Target) -> str:
    """Return why a node doesn't hold the target, or ""."""
    hold = standing.hold
    if hold is None:
        return standing.trouble
    position = (hold.stepped, hold.run, beginning_of(hold).source(target.iteration))
    if position == (target.iteration, target.run, target.start):
        return unfit(hold)
    return unfit(hold) or hold.trouble or _progress(hold)


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
    has_ended: bool = False
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
    able = all_able(job, stood, lambda standing: _why_not(standing, beginning))
    holders = {shard: most_complete(shard_standings) for shard, shard_standings in able.items()}
    offered = [
        standing.hold
        for shard, shard_standings in able.items()
        for standing in shard_standings
        if standing.hold is not None and standing.node in holders[shard]
    ]
    stepped = max(hold.stepped for hold in offered)
    has_ended = all(hold.last and hold.stepped == stepped for hold in offered)
    return Source(beginning, stepped, holders, fenced, has_ended)


def _why_not(standing: Standing, beginning: Beginning) -> str:
    """Return why a node can't provide a shard, or ""."""
    hold = standing.hold
    if hold is None:
        return standing.trouble
    reason = stranger(hold, beginning) or unfit(hold)
    if reason or hold.offered or (hold.live and hold.lacks_buffers):
        return reason
    return hold.trouble or f"is not live yet, {at_iteration(hold.stepped)}"
