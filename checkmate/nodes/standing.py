"""A job's shards, the shadow nodes' answers about them, and the newest start of training. Pure.

From this, `target` selects the nodes to read from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from checkmate.base.wording import counted, shortened
from checkmate.job.schema import Job
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import INCARNATIONS, REFUSAL_MAX

T = TypeVar("T")

Shard = tuple[int, int]
"""A DP group's index, and a shadow id in it."""

Answers = Mapping[int, pb.NodeStatus | str]
"""By node: its status, or why there is none."""

_NO_ANSWER: Final = "has not answered"
_MAX_SHOWN: Final = 4
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
        shard: [f"{node_name(job, node)}: {text}" for node, text in reasons]
        for shard, reasons in troubles.items()
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
    holds = (standing.hold for group in stood.values() for standing in group if standing.hold is not None)
    for beginning in newest_beginnings(holds):
        try:
            return of(stood, beginning)
        except Lacking as error:
            troubles.append(error)
    if troubles:
        raise troubles[0]
    nothing = why_lacking(job, stood, lambda standing: standing.trouble)
    has_answer = any(isinstance(answer, pb.NodeStatus) for answer in answers.values())
    raise nothing if has_answer else NoAnswer(nothing.shards)


def all_able(job: Job, stood: Standings, trouble: Trouble) -> dict[Shard, list[Standing]]:
    """Return the standings without trouble, by shard. Raise `Lacking` if some shard has none."""
    able = {
        shard: [standing for standing in standings if not trouble(standing)]
        for shard, standings in stood.items()
    }
    without = {shard: stood[shard] for shard, standings in able.items() if not standings}
    if without:
        raise why_lacking(job, without, trouble)
    return able


def why_lacking(job: Job, without: Standings, trouble: Trouble) -> Lacking:
    """Return `Lacking` for shards that no node can provide. Doubtful ones count as wrong."""
    troubles = {
        shard: [(standing.node, trouble(standing)) for standing in stood] for shard, stood in without.items()
    }
    wrong = [
        shard
        for shard, stood in without.items()
        for standing in stood
        if standing.hold is not None and standing.hold.doubtful and trouble(standing) == unfit(standing.hold)
    ]
    return lacking(job, troubles, wrong)


def discarded(answers: Answers) -> int:
    """Return the greatest generation that `checkmate reset` has discarded on any node; 0 if none."""
    return max(
        (answer.discarded for answer in answers.values() if isinstance(answer, pb.NodeStatus)), default=0
    )


def greatest_generation(answers: Answers) -> int:
    """Return the greatest generation that any node knows; 0 if none."""
    return max(
        (answer.generation for answer in answers.values() if isinstance(answer, pb.NodeStatus)), default=0
    )


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
    candidates: list[pb.Refusal | pb.HoldStatus] = [*refusals, *(hold for _, hold in counted_holds(answers))]
    generation = max((candidate.generation for candidate in candidates), default=0)
    incarnation = newest_incarnation(
        candidate.incarnation for candidate in candidates if candidate.generation == generation
    )
    newest = [
        candidate
        for candidate in refusals
        if (candidate.generation, candidate.incarnation) == (generation, incarnation)
    ]
    return min(
        newest, key=lambda candidate: (candidate.iteration, candidate.rank, candidate.text), default=None
    )


def refusal_words(refusal: pb.Refusal) -> str:
    """Return when and why a script was refused, for after `training was refused` and the like."""
    rank, text = shortened(refusal.rank), shortened(refusal.text, REFUSAL_MAX)
    return f"in iteration {refusal.iteration} on {rank}: {text}"


def overlap_words(hosts: Collection[str]) -> str:
    """Return what is wrong if trainers of an older start go on, by the addresses of their hosts."""
    addresses = " and ".join(
        filter(None, [", ".join(list(hosts)[:_MAX_SHOWN]), _more(len(hosts) - _MAX_SHOWN)])
    )
    return (
        f"an older start of this job still trains: its step records come from {addresses}. Shadow nodes "
        "follow the newer start only, so what the older one trains is not kept: end one of the two"
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
            for node in dict.fromkeys(
                [*expected, *(node for node, held_shard in holds if held_shard == shard)]
            )
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
    beginnings = {beginning_of(hold) for hold in holds}
    generation = max((beginning.generation for beginning in beginnings), default=0)
    beginnings = {beginning for beginning in beginnings if beginning.generation == generation}
    incarnation = newest_incarnation(beginning.incarnation for beginning in beginnings)
    return sorted(beginning for beginning in beginnings if beginning.incarnation == incarnation)


def newest_incarnation(incarnations: Iterable[int]) -> int | None:
    """Return the newest of some incarnations, which wrap at 256: no other is ahead of it by less than 128.

    This is the serial number arithmetic of RFC 1982.
    """
    numbers = sorted(set(incarnations))
    ahead = {i: sum(0 < (later - i) % INCARNATIONS < INCARNATIONS // 2 for later in numbers) for i in numbers}
    return min(numbers, key=lambda i: ahead[i], default=None)


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
    complete = [
        standing.node for standing in able if standing.hold is not None and not standing.hold.lacks_buffers
    ]
    return tuple(complete or [standing.node for standing in able])


def lag(hold: pb.HoldStatus) -> int:
    """Return the number of iterations by which trainers are ahead of the last step."""
    return max(0, hold.receiving - hold.stepped, hold.trained - hold.stepped) if hold.seeded else 0
