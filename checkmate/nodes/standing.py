"""A job's shards, the shadow nodes' answers about them, and the newest start of training. Pure.

From this, `offers` (reading during training) and `target` (a restart) select the nodes to read from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from checkmate.job.schema import Job
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import INCARNATIONS, REFUSAL_MAX
from checkmate.wording import counted, shortened

T = TypeVar("T")

Shard = tuple[int, int]
"""A DP group's index, and a shadow id in it."""

Answers = Mapping[int, pb.NodeStatus | str]
"""By node: its status, or why there is none."""

_NO_ANSWER: Final = "has not answered"
_SHOWN: Final = 4
"""Addresses in a message."""


@dataclass(frozen=True, order=True)
class Beginning:
    """A start of training. Holds of different starts are never combined."""

    generation: int
    incarnation: int
    run: str
    first_iteration: int
    start: bytes
    continues: bytes = b""

    def source(self, iteration: int) -> bytes:
        """Return the start to which its state after an iteration belongs; see `BeginRequest.continues`."""
        return self.start if iteration >= self.first_iteration else self.continues


@dataclass(frozen=True)
class Standing:
    """One node's hold of one shard, or why there is none."""

    node: int
    hold: pb.HoldStatus | None
    trouble: str = ""


Standings = Mapping[Shard, Sequence[Standing]]
"""By shard: the nodes that should hold it, in order, then others that hold it."""

Trouble = Callable[[Standing], str]
"""Returns why a node can't provide a shard, or ""."""


@dataclass
class Lacking(Exception):
    """Some shards are not available: the reasons of each of their holders."""

    shards: dict[Shard, list[str]] = field(default_factory=dict)
    wrong: frozenset[Shard] = frozenset()
    """Those of them that are there but wrong. Waiting for nodes to be started and seeded does not help."""

    def __str__(self) -> str:
        return "; ".join(
            f"{name(shard)}: {', '.join(troubles) or 'no node holds it'}"
            for shard, troubles in sorted(self.shards.items())
        )


@dataclass
class NoAnswer(Lacking):
    """No shadow node answers."""


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


def node_name(job: Job, node: int) -> str:
    """Return a node's name in messages: `shadow node 0 (10.0.0.1:7000)`."""
    return f"shadow node {node} ({job.node(node).mgmt})"


def lacking(
    job: Job, troubles: Mapping[Shard, Iterable[tuple[int, str]]], wrong: Iterable[Shard] = ()
) -> Lacking:
    """Return `Lacking` with the troubles of nodes, by shard."""
    shards = {
        shard: [f"{node_name(job, node)}: {text}" for node, text in found]
        for shard, found in troubles.items()
    }
    return Lacking(shards, frozenset(wrong))


def decide(job: Job, answers: Answers, of: Callable[[Standings, Beginning], T]) -> T:
    """Return the result of `of` for the newest start of training.

    If several starts have the newest number, their order is unknown, and the first that is complete counts.

    Raises:
        Lacking: None of them is complete.
        NoAnswer: No node answers.
    """
    stood = standings(job, answers)
    troubles = []
    holds = (one.hold for found in stood.values() for one in found if one.hold is not None)
    for beginning in newest_beginnings(holds):
        try:
            return of(stood, beginning)
        except Lacking as error:
            troubles.append(error)
    if troubles:
        raise troubles[0]
    nothing = why_lacking(job, stood, lambda one: one.trouble)
    answered = any(isinstance(answer, pb.NodeStatus) for answer in answers.values())
    raise nothing if answered else NoAnswer(nothing.shards)


def all_able(job: Job, stood: Standings, trouble: Trouble) -> dict[Shard, list[Standing]]:
    """Return the standings without trouble, by shard. Raise `Lacking` if some shard has none."""
    able = {shard: [one for one in found if not trouble(one)] for shard, found in stood.items()}
    without = {shard: stood[shard] for shard, found in able.items() if not found}
    if without:
        raise why_lacking(job, without, trouble)
    return able


def why_lacking(job: Job, without: Standings, trouble: Trouble) -> Lacking:
    """Return `Lacking` for shards that no node can provide. Doubtful ones count as wrong."""
    troubles = {shard: [(one.node, trouble(one)) for one in stood] for shard, stood in without.items()}
    wrong = [
        shard
        for shard, stood in without.items()
        for one in stood
        if one.hold is not None and one.hold.doubtful and trouble(one) == unfit(one.hold)
    ]
    return lacking(job, troubles, wrong)


def discarded(answers: Answers) -> int:
    """Return the greatest generation that `checkmate reset` has discarded on any node; 0 if none."""
    return max((one.discarded for one in answers.values() if isinstance(one, pb.NodeStatus)), default=0)


def greatest_generation(answers: Answers) -> int:
    """Return the greatest generation that any node knows; 0 if none."""
    return max((one.generation for one in answers.values() if isinstance(one, pb.NodeStatus)), default=0)


def newest_refusal(answers: Answers) -> pb.Refusal | None:
    """Return why a script was refused in the newest start of training, or `None` if it was not.

    If it was refused on several ranks, the first one counts: by iteration, then by name.
    """
    least = discarded(answers)
    refusals = [
        answer.refusal
        for answer in answers.values()
        if isinstance(answer, pb.NodeStatus) and answer.HasField("refusal")
        if not least or answer.refusal.generation > least
    ]
    known: list[pb.Refusal | pb.HoldStatus] = [*refusals, *(hold for _, hold in counted_holds(answers))]
    generation = max((one.generation for one in known), default=0)
    incarnation = newest_incarnation(one.incarnation for one in known if one.generation == generation)
    newest = [one for one in refusals if (one.generation, one.incarnation) == (generation, incarnation)]
    return min(newest, key=lambda one: (one.iteration, one.rank, one.text), default=None)


def refusal_words(refusal: pb.Refusal) -> str:
    """Return when and why a script was refused, for after `training was refused` and the like."""
    rank, text = shortened(refusal.rank), shortened(refusal.text, REFUSAL_MAX)
    return f"in iteration {refusal.iteration} on {rank}: {text}"


def overlap_words(hosts: Collection[str]) -> str:
    """Return what is wrong if trainers of an older start go on, by the addresses of their hosts."""
    shown = " and ".join(filter(None, [", ".join(list(hosts)[:_SHOWN]), _more(len(hosts) - _SHOWN)]))
    return (
        f"an older start of this job still trains: its step records come from {shown}. Shadow nodes follow "
        "the newer start only, so what the older one trains is not kept: end one of the two"
    )


def _more(hosts: int) -> str:
    return counted(hosts, "more host") if hosts > 0 else ""


def counted_holds(answers: Answers) -> list[tuple[int, pb.HoldStatus]]:
    """Return all holds with their nodes, without those of discarded runs, which a node that was away has."""
    least = discarded(answers)
    return [
        (node, hold)
        for node, answer in answers.items()
        if isinstance(answer, pb.NodeStatus)
        for hold in answer.holds
        if not least or hold.generation > least
    ]


def standings(job: Job, answers: Answers) -> dict[Shard, list[Standing]]:
    """Return the nodes' standings, by shard."""
    holds = {(node, (hold.shard.group, hold.shard.shard)): hold for node, hold in counted_holds(answers)}
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

    There is only one, unless incarnations have wrapped.
    """
    begun = {beginning_of(hold) for hold in holds}
    generation = max((one.generation for one in begun), default=0)
    begun = {one for one in begun if one.generation == generation}
    incarnation = newest_incarnation(one.incarnation for one in begun)
    return sorted(one for one in begun if one.incarnation == incarnation)


def newest_incarnation(incarnations: Iterable[int]) -> int | None:
    """Return the newest of some incarnations, which wrap at 256: no other is ahead of it by less than 128.

    This is the serial number arithmetic of RFC 1982.
    """
    seen = sorted(set(incarnations))
    ahead = {i: sum(0 < (other - i) % INCARNATIONS < INCARNATIONS // 2 for other in seen) for i in seen}
    return min(seen, key=lambda i: ahead[i], default=None)


def beginning_of(hold: pb.HoldStatus) -> Beginning:
    """Return the start of training that a hold is of."""
    return Beginning(
        hold.generation, hold.incarnation, hold.run, hold.first_iteration, hold.start, hold.continues
    )


def stranger(hold: pb.HoldStatus, beginning: Beginning) -> str:
    """Return how a hold's start of training differs from this one, or ""."""
    if beginning_of(hold) == beginning:
        return ""
    if hold.generation != beginning.generation:
        return f"is still in generation {hold.generation}, not {beginning.generation}"
    if hold.incarnation != beginning.incarnation:
        return f"is still in incarnation {hold.incarnation}, not {beginning.incarnation}"
    return f"is in another start of training, which has the same incarnation {hold.incarnation}"


def unfit(hold: pb.HoldStatus) -> str:
    """Return why a hold's state can't be used, or ""."""
    if not hold.seeded:
        return hold.trouble or "is not seeded yet"
    if hold.doubtful:
        return hold.trouble or "differs from the trainers' state"
    return ""


def most_complete(able: Sequence[Standing]) -> tuple[int, ...]:
    """Return the nodes whose holds do not lack buffers, or all nodes if each lacks some.

    Buffers may come with any shard of a DP group.
    """
    complete = [one.node for one in able if one.hold is not None and not one.hold.lacks_buffers]
    return tuple(complete or [one.node for one in able])
