"""What shadow nodes say of a job's shards, and which start of training is the newest. Pure.

`offers` (a read while training goes on) and `target` (a restart) decide over this what can be had from whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from checkmate.job.schema import Job
from checkmate.nodes.shards import Shard, holders_of, name, node_name
from checkmate.rpc import shadow_pb2 as pb

T = TypeVar("T")

Answers = Mapping[int, pb.NodeStatus | str]
"""By node: its status, or why it gave none."""

INCARNATIONS: Final = 256
_NO_ANSWER: Final = "has not answered"


@dataclass(frozen=True, order=True)
class Beginning:
    """A start of training. Holds of one are never put together with those of another."""

    generation: int
    incarnation: int
    run: str
    first_iteration: int
    start: bytes


@dataclass(frozen=True)
class Standing:
    """What a node says of one shard: its hold, or why there is none."""

    node: int
    hold: pb.HoldStatus | None
    trouble: str = ""


Standings = Mapping[Shard, Sequence[Standing]]
"""By shard: the nodes that should hold it, in order, then others that do."""

Trouble = Callable[[Standing], str]
"""Why a node can't give a shard; empty if it can."""


@dataclass
class Lacking(Exception):
    """Not all shards can be had: for each that stands in the way, what each of its holders says."""

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


def lacking(
    job: Job, troubles: Mapping[Shard, Iterable[tuple[int, str]]], wrong: Iterable[Shard] = ()
) -> Lacking:
    """Return `Lacking` from what is wrong with nodes, by shard."""
    shards = {
        shard: [f"{node_name(job, node)}: {text}" for node, text in said] for shard, said in troubles.items()
    }
    return Lacking(shards, frozenset(wrong))


def decide(job: Job, answers: Answers, of: Callable[[Standings, Beginning], T]) -> T:
    """Return what `of` makes of the newest start of training.

    If several starts have its number, which can't be told apart by age, the first that is whole counts.
    `Lacking` if none is whole; `NoAnswer` if no node answers.
    """
    stood = standings(job, answers)
    troubles = []
    for beginning in newest_beginnings(_holds(stood)):
        try:
            return of(stood, beginning)
        except Lacking as error:
            troubles.append(error)
    if troubles:
        raise troubles[0]
    nothing = why_lacking(job, stood, lambda one: one.trouble)
    raise nothing if _any_answered(answers) else NoAnswer(nothing.shards)


def all_able(job: Job, stood: Standings, trouble: Trouble) -> dict[Shard, list[Standing]]:
    """Return who has no trouble, for each shard. `Lacking` if that is nobody for one of them."""
    able = {shard: [one for one in said if not trouble(one)] for shard, said in stood.items()}
    without = {shard: stood[shard] for shard, found in able.items() if not found}
    if without:
        raise why_lacking(job, without, trouble)
    return able


def why_lacking(job: Job, without: Standings, trouble: Trouble) -> Lacking:
    """Return `Lacking` of shards with which all nodes have trouble. Those in doubt are wrong themselves."""
    said = {shard: [(one.node, trouble(one)) for one in stood] for shard, stood in without.items()}
    wrong = [shard for shard, stood in without.items() if any(_is_wrong(one, trouble) for one in stood)]
    return lacking(job, said, wrong)


def _is_wrong(standing: Standing, trouble: Trouble) -> bool:
    hold = standing.hold
    return hold is not None and hold.doubtful and trouble(standing) == unfit(hold)


def _any_answered(answers: Answers) -> bool:
    return any(isinstance(answer, pb.NodeStatus) for answer in answers.values())


def _holds(stood: Standings) -> Iterator[pb.HoldStatus]:
    return (one.hold for said in stood.values() for one in said if one.hold is not None)


def standings(job: Job, answers: Answers) -> dict[Shard, list[Standing]]:
    """Return what nodes say, sorted by shard."""
    holds = {
        (node, (hold.shard.group, hold.shard.shard)): hold
        for node, answer in answers.items()
        if isinstance(answer, pb.NodeStatus)
        for hold in answer.holds
    }
    return {
        shard: [
            Standing(node, holds.get((node, shard)), _why_none(answers.get(node, _NO_ANSWER)))
            for node in dict.fromkeys([*expected, *(node for node, held in holds if held == shard)])
        ]
        for shard, expected in holders_of(job).items()
    }


def _why_none(answer: pb.NodeStatus | str) -> str:
    """Return why a node has no hold of a shard, if it has none."""
    if isinstance(answer, str):
        return answer
    if answer.holds_nothing or not (answer.holds or answer.trouble):
        return "holds nothing"
    return "; ".join(["does not hold it", *answer.trouble])


def newest_beginnings(holds: Iterable[pb.HoldStatus]) -> list[Beginning]:
    """Return the starts of the greatest generation and, in it, the newest incarnation.

    It is one, unless incarnations have come round.
    """
    begun = {beginning_of(hold) for hold in holds}
    generation = max((one.generation for one in begun), default=0)
    begun = {one for one in begun if one.generation == generation}
    incarnation = newest_incarnation(one.incarnation for one in begun)
    return sorted(one for one in begun if one.incarnation == incarnation)


def newest_incarnation(incarnations: Iterable[int]) -> int | None:
    """Return the newest of some: the one that none is less than 128 ahead of (RFC 1982).

    They count mod 256.
    """
    seen = sorted(set(incarnations))
    ahead = {i: sum(0 < (other - i) % INCARNATIONS < INCARNATIONS // 2 for other in seen) for i in seen}
    return min(seen, key=lambda i: ahead[i], default=None)


def beginning_of(hold: pb.HoldStatus) -> Beginning:
    """Return the start of training that a hold is of."""
    return Beginning(hold.generation, hold.incarnation, hold.run, hold.first_iteration, hold.start)


def stranger(hold: pb.HoldStatus, beginning: Beginning) -> str:
    """Return how a hold's start of training differs; empty if it is of this one."""
    if beginning_of(hold) == beginning:
        return ""
    if hold.generation != beginning.generation:
        return f"is still in generation {hold.generation}, not {beginning.generation}"
    if hold.incarnation != beginning.incarnation:
        return f"is still in incarnation {hold.incarnation}, not {beginning.incarnation}"
    return f"is in another start of training, which has the same incarnation {hold.incarnation}"


def unfit(hold: pb.HoldStatus) -> str:
    """Return why what a hold has is worth nothing; empty if it isn't."""
    if not hold.seeded:
        return hold.trouble or "is not seeded yet"
    if hold.doubtful:
        return hold.trouble or "differs from the trainers' state"
    return ""


def most_complete(able: Sequence[Standing]) -> tuple[int, ...]:
    """Return the nodes whose holds lack no buffers; all of them if each lacks some.

    Of a DP group's buffers those count that any of its shards brings.
    """
    complete = [one.node for one in able if one.hold is not None and not one.hold.lacks_buffers]
    return tuple(complete or [one.node for one in able])
