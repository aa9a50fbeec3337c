"""Which iteration a restart resumes from, and which shadow nodes have it. Pure (design, section 7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkmate.job.schema import Job
from checkmate.nodes.shards import Shard
from checkmate.nodes.standing import (
    INCARNATIONS,
    Answers,
    Beginning,
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


@dataclass(frozen=True)
class Target:
    """The iteration to settle at, the start that it belongs to, and the nodes that can reach it, by shard."""

    iteration: int
    run: str
    holders: Mapping[Shard, tuple[int, ...]]
    lacking: int = 0
    """How many buffers all these nodes lack so far, of the DP group that lacks most."""
    behind: int = 0
    """How many iterations beyond it a node has stepped that no other shard's nodes can follow."""
    generation: int = 0

    @property
    def complete(self) -> bool:
        """Whether nodes that have not answered can add nothing."""
        return not (self.lacking or self.behind)


@dataclass(frozen=True)
class _Reach:
    """What a hold can be settled at: each iteration from `stepped` to `in_full`."""

    standing: Standing
    shard: Shard
    stepped: int
    in_full: int
    lacks_buffers: int


def next_incarnation(answers: Iterable[pb.NodeStatus], clock: float) -> int:
    """Return the one after the newest that any node has seen; the clock's seconds mod 256 if none has."""
    last = newest_incarnation(answer.incarnation for answer in answers if not answer.holds_nothing)
    return int(clock if last is None else last + 1) % INCARNATIONS


def find_target(job: Job, answers: Answers) -> Target:
    """Return the target of fenced nodes. `Lacking` names the shards that stand in its way; `NoAnswer`.

    It is the smallest "in full" of the holds whose "in full" is not below the largest "stepped": nothing that
    was stepped is repeated, and as many holds as can be stay. If not every shard has such a hold, it is the
    newest iteration that every shard can be settled at.

    A hold counts if it is seeded and not doubtful, and of the newest start; or of an older incarnation of the
    same run, if it can be settled at what the newest began from. Of a shard's holders, those that lack
    buffers are left out if another has them all: ranks take what buffers they find with any shard.
    """
    return decide(job, answers, lambda stood, beginning: _target(job, stood, beginning))


def _target(job: Job, stood: Standings, beginning: Beginning) -> Target:
    usable = list(_usable(stood, beginning))
    stepped = max((hold.stepped for hold in usable), default=-1)
    able = [hold for hold in usable if hold.in_full >= stepped]
    without = _without(stood, able)
    if without:
        able = _newest_whole(stood, usable)
    if not able:
        standing = {shard: stood[shard] for shard in without}
        raise why_lacking(job, standing, lambda one: _trouble(one, beginning, stepped))
    iteration = min(hold.in_full for hold in able)
    behind = max(stepped - iteration, 0)
    holders, lacks = _holders(stood, able), _lacking_buffers(able)
    return Target(iteration, beginning.run, holders, lacks, behind, beginning.generation)


def _holders(shards: Iterable[Shard], able: Sequence[_Reach]) -> dict[Shard, tuple[int, ...]]:
    return {shard: most_complete([one.standing for one in able if one.shard == shard]) for shard in shards}


def _without(shards: Iterable[Shard], holds: Iterable[_Reach]) -> list[Shard]:
    """Return the shards that none of the holds is of."""
    return sorted(set(shards) - {hold.shard for hold in holds})


def _newest_whole(shards: Iterable[Shard], usable: Sequence[_Reach]) -> list[_Reach]:
    """Return the holds that can be settled at the newest iteration that every shard can; empty: at none."""
    for iteration in sorted({hold.in_full for hold in usable}, reverse=True):
        able = [hold for hold in usable if hold.stepped <= iteration <= hold.in_full]
        if not _without(shards, able):
            return able
    return []


def _usable(stood: Standings, beginning: Beginning) -> Iterator[_Reach]:
    for shard, said in stood.items():
        for standing in said:
            reach = _reach(standing, shard, beginning)
            if reach is not None:
                yield reach


def _reach(standing: Standing, shard: Shard, beginning: Beginning) -> _Reach | None:
    """Return what a node's hold can be settled at, if it can."""
    hold, origin = standing.hold, beginning.first_iteration - 1
    if hold is None or unfit(hold):
        return None
    if beginning_of(hold) == beginning:
        return _Reach(standing, shard, hold.stepped, hold.in_full, hold.lacks_buffers)
    if _older(hold, beginning) and hold.stepped <= origin <= hold.in_full:
        return _Reach(standing, shard, hold.stepped, origin, hold.lacks_buffers)
    return None


def _older(hold: pb.HoldStatus, beginning: Beginning) -> bool:
    """Return whether a hold is of an older incarnation of the same run."""
    return hold.run == beginning.run and hold.incarnation != beginning.incarnation


def _lacking_buffers(holds: Sequence[_Reach]) -> int:
    """Return, of each DP group, the fewest buffers that one of its holds lacks; the most of these."""
    least: dict[int, int] = {}
    for hold in holds:
        lacks = hold.lacks_buffers if hold.stepped >= 0 else 0  # records bring them: there was none yet
        least[hold.shard[0]] = min(lacks, least.get(hold.shard[0], lacks))
    return max(least.values(), default=0)


def _trouble(standing: Standing, beginning: Beginning, stepped: int) -> str:
    """Return why a node's hold can't be settled where others are."""
    hold = standing.hold
    if hold is None:
        return standing.trouble
    strange = stranger(hold, beginning)
    if strange and _older(hold, beginning):
        strange = f"{strange}, which began at iteration {beginning.first_iteration}, and {_stands(hold)}"
    return strange or unfit(hold) or hold.trouble or f"{_stands(hold)}, and another has stepped {stepped}"


def _stands(hold: pb.HoldStatus) -> str:
    return f"has stepped iteration {hold.stepped} and has {hold.in_full} in full"


def find_settled(job: Job, target: Target, answers: Answers) -> dict[Shard, list[int]]:
    """Return which nodes hold the target now, by their answers to Settle. `Lacking`: of a shard none does."""
    stood = {
        shard: [one for one in said if one.node in target.holders[shard]]
        for shard, said in standings(job, answers).items()
    }
    able = all_able(job, stood, lambda one: _unsettled(one, target))
    return {shard: [one.node for one in found] for shard, found in able.items()}


def _unsettled(standing: Standing, target: Target) -> str:
    """Return why a node doesn't hold the target; empty if it does."""
    hold = standing.hold
    if hold is None:
        return standing.trouble
    if (hold.stepped, hold.run) == (target.iteration, target.run):
        return unfit(hold)
    return unfit(hold) or hold.trouble or _stands(hold)
