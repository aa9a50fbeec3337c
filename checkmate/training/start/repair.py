"""Selects the parts of step records that shadow nodes copy from one another before a restart. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from checkmate.rpc import shadow_pb2 as pb

Key = tuple[int, int, str, bytes]
"""Identifies a DP group in one start of training: group, incarnation, run, start."""
Part = tuple[int, int]
"""Identifies a part: a rank's position, and an iteration."""


def wanted_parts(answers: Iterable[pb.NodeStatus]) -> dict[int, pb.CopyRequest]:
    """Return, by node, the parts that it lacks and another node has (design, section 7).

    A node does not need parts of a start of training that it is not in, nor of iterations that all its holds
    have stepped. `answers` are those to `Fence`.
    """
    answers = list(answers)
    given: dict[Key, dict[Part, int]] = {}
    for answer in answers:
        for held in answer.parts:
            parts = given.setdefault(_key(held), {})
            for part in _each(held):
                parts.setdefault(part, answer.node)
    found = {}
    for answer in answers:
        request = pb.CopyRequest(job=answer.job)
        for held in answer.parts:
            lacking = given[_key(held)].keys() - set(_each(held))
            stepped = [hold.stepped for hold in answer.holds if hold.shard.group == held.group]
            needed = sorted(part for part in lacking if part[1] > min(stepped, default=-1))
            request.wanted.extend(_grouped(held, {part: given[_key(held)][part] for part in needed}))
        if request.wanted:
            found[answer.node] = request
    return found


def _key(held: pb.PartsHeld) -> Key:
    return (held.group, held.incarnation, held.run, held.start)


def _each(held: pb.PartsHeld) -> Iterator[Part]:
    return ((one.position, t) for one in held.ranges for t in range(one.first, one.last + 1))


def _grouped(held: pb.PartsHeld, needed: Mapping[Part, int]) -> Iterator[pb.PartsWanted]:
    """Yield the needed parts, as ranges per source node."""
    for node in dict.fromkeys(needed.values()):
        wanted = pb.PartsWanted(node=node)
        wanted.parts.CopyFrom(
            pb.PartsHeld(group=held.group, incarnation=held.incarnation, run=held.run, start=held.start)
        )
        for position, t in (part for part, source in needed.items() if source == node):
            last = wanted.parts.ranges[-1] if wanted.parts.ranges else None
            if last is not None and (last.position, last.last + 1) == (position, t):
                last.last = t
            else:
                wanted.parts.ranges.add(position=position, first=t, last=t)
        yield wanted
