"""Which iteration a restart resumes from, and which shadow nodes have it. Pure (design, section 7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkmate.consolidate.choose import INCARNATIONS, Shard, newest_incarnation
from checkmate.rpc import shadow_pb2 as pb


@dataclass(frozen=True)
class Target:
    """The iteration to settle at, the run that it belongs to, and the nodes that can reach it, by shard.

    `lacking`: buffers that all these nodes lack so far, of the DP group where they are most.
    """

    iteration: int
    run: str
    holders: Mapping[Shard, tuple[int, ...]]
    lacking: int = 0


@dataclass(frozen=True)
class Missing:
    """No iteration is whole: these shards stand in its way."""

    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class _Hold:
    node: int
    shard: Shard
    stepped: int
    in_full: int
    lacks_buffers: int


def next_incarnation(answers: Iterable[pb.NodeStatus], clock: float) -> int:
    """The one after the newest that any node has seen; the clock's seconds mod 256 where none has."""
    last = newest_incarnation(answer.incarnation for answer in answers if not answer.holds_nothing)
    return int(clock if last is None else last + 1) % INCARNATIONS


def choose(shards: Sequence[Shard], answers: Sequence[pb.NodeStatus]) -> Target | Missing:
    """The target: the smallest "in full" of the holds whose "in full" is not below the largest "stepped".

    A hold counts if it is seeded and not doubtful, and of the newest incarnation; or of an older one and the
    same run, if it has what the newest began from. Of a shard's holders, one that lacks buffers is left out
    where another has them all: ranks take what buffers they find with any shard.
    """
    began = _beginning(answers)
    if began is None:
        return Missing(tuple(shards))
    holds = list(_usable(answers, began))
    stepped = max((hold.stepped for hold in holds), default=0)
    able = [hold for hold in holds if hold.in_full >= stepped]
    holders = {shard: _with_most_buffers([hold for hold in able if hold.shard == shard]) for shard in shards}
    lacking = tuple(shard for shard in shards if not holders[shard])
    if lacking:
        return Missing(lacking)
    return Target(min(hold.in_full for hold in able), began.run, holders, _lacking_buffers(able))


def _lacking_buffers(holds: Sequence[_Hold]) -> int:
    """Of each DP group the fewest buffers that one of its holds lacks; the most of these."""
    least: dict[int, int] = {}
    for hold in holds:
        lacks = hold.lacks_buffers if hold.stepped >= 0 else 0  # records bring them: there was none yet
        least[hold.shard[0]] = min(lacks, least.get(hold.shard[0], lacks))
    return max(least.values(), default=0)


def _with_most_buffers(holds: Sequence[_Hold]) -> tuple[int, ...]:
    """The nodes of a shard's holds that lack no buffers; of all of them where each lacks some."""
    complete = [hold.node for hold in holds if not hold.lacks_buffers]
    return tuple(complete or [hold.node for hold in holds])


def _beginning(answers: Sequence[pb.NodeStatus]) -> pb.HoldStatus | None:
    """A hold of the newest incarnation, which says where that began and in which run."""
    all_holds = [hold for answer in answers for hold in answer.holds]
    last = newest_incarnation(hold.incarnation for hold in all_holds)
    return next((hold for hold in all_holds if hold.incarnation == last), None)


def _usable(answers: Sequence[pb.NodeStatus], began: pb.HoldStatus) -> Iterator[_Hold]:
    origin = began.first_iteration - 1
    for answer in answers:
        for hold in answer.holds:
            if not hold.seeded or hold.doubtful or hold.run != began.run:
                continue
            shard = (hold.shard.group, hold.shard.shard)
            if hold.incarnation == began.incarnation:
                yield _Hold(answer.node, shard, hold.stepped, hold.in_full, hold.lacks_buffers)
            elif hold.stepped <= origin <= hold.in_full:
                yield _Hold(answer.node, shard, hold.stepped, origin, hold.lacks_buffers)


def settled(
    shards: Sequence[Shard], target: Target, answers: Sequence[pb.NodeStatus]
) -> dict[Shard, list[int]]:
    """Which nodes, by their answers to Settle, now hold the target: a shard without any has an empty list."""
    found: dict[Shard, list[int]] = {shard: [] for shard in shards}
    for answer in answers:
        for hold in answer.holds:
            shard = (hold.shard.group, hold.shard.shard)
            right = hold.seeded and hold.stepped == target.iteration and hold.run == target.run
            if right and answer.node in target.holders.get(shard, ()):
                found[shard].append(answer.node)
    return found


def whole(holders: Mapping[Shard, Sequence[int]]) -> bool:
    """Whether every shard has a holder."""
    return all(holders.values())


def spread(holders: Sequence[int], rank: int) -> list[int]:
    """A shard's holders in the order in which a rank tries them, so that ranks share them evenly."""
    start = rank % len(holders) if holders else 0
    return [*holders[start:], *holders[:start]]


def names(shards: Iterable[Shard]) -> str:
    """Shards for a message: `shard 0 of DP group 1, ...`"""
    return ", ".join(f"shard {shard} of DP group {group}" for group, shard in shards)
