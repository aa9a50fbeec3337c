"""Reserves an iteration on shadow nodes, so that all of them serve the same one while training continues."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from checkmate.nodes.stubs import ANSWER_SECONDS, Stubs
from checkmate.rpc import shadow_pb2 as pb

_MARGINS: Final = (0, 1, 2, 4, 8)
"""How many iterations to reserve ahead of the newest one, in successive attempts."""
_TOO_FAST: Final = "advances faster than iterations can be reserved"


@dataclass
class NotReserved(Exception):
    """No iteration could be reserved on enough nodes. `refused`: the reasons, by node."""

    refused: Mapping[int, str]

    def __str__(self) -> str:
        return "; ".join(f"shadow node {node}: {why}" for node, why in sorted(self.refused.items()))


@dataclass(frozen=True)
class Reservation:
    """An iteration, and the nodes that keep it readable. `refused`: the reasons of the others, by node."""

    iteration: int
    granted: frozenset[int]
    refused: Mapping[int, str]


@contextmanager
def reserved(
    stubs: Stubs,
    nodes: Collection[int],
    seconds: float,
    *,
    newest: int | None = None,
    at_least: int = 0,
    enough: Callable[[Collection[int]], bool] | None = None,
) -> Iterator[Reservation]:
    """Reserve the newest iteration that enough nodes grant, and release it at the end of the block.

    Args:
        stubs: Stubs of the job's nodes.
        nodes: The nodes to ask.
        seconds: The time after which nodes release the iteration on their own.
        newest: The newest iteration that the nodes have stepped; `None` to ask them.
        at_least: The lowest iteration to reserve.
        enough: Returns whether these nodes are enough; by default all are required.

    Raises:
        NotReserved: Too few nodes have granted any iteration.
    """
    enough = enough or (lambda granted: len(granted) == len(nodes))
    refused: Mapping[int, str] = {}
    stepped = -1 if newest is None else newest
    for margin in _MARGINS if newest is not None else (0, *_MARGINS):
        iteration = max(stepped + margin, at_least, 0)
        request = pb.ReserveRequest(job=stubs.job.job, iteration=iteration, seconds=seconds)
        answers = stubs.ask(nodes, lambda stub: stub.Reserve, request, min(seconds, ANSWER_SECONDS))
        refused = {node: why for node, answer in answers.items() if (why := _refusal(answer))}
        granted = frozenset(answers.keys() - refused.keys())
        try:
            if enough(granted):
                yield Reservation(iteration, granted, refused)
                return
        finally:
            release = pb.ReleaseRequest(job=stubs.job.job, iteration=iteration)
            stubs.ask(granted, lambda stub: stub.Release, release)
        stepped = max([stepped, *(one.stepped for one in answers.values() if not isinstance(one, str))])
        if stepped < 0:
            break  # no hold is live: no later iteration would be granted either
    raise NotReserved(refused)


def _refusal(answer: pb.ReserveReply | str) -> str:
    """Return why a node has refused a reservation, or ""."""
    if isinstance(answer, str):
        return answer
    return "" if answer.granted else _TOO_FAST
