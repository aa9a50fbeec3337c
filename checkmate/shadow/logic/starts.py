"""The starts of training that may not begin on a shadow node: ended by a restart, or discarded. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.group import CallRefused, Start, start_of

_REMEMBERED: Final = 64


class EndedStarts:
    """What a restart has ended (`drain`, `fence`), and what `checkmate reset` has discarded."""

    def __init__(self) -> None:
        self.discarded = 0
        """The greatest generation that was discarded; 0: none."""
        self._fenced: deque[Start] = deque(maxlen=_REMEMBERED)

    def end(self, start: Start) -> None:
        """Refuse a start from now on."""
        if start not in self._fenced:
            self._fenced.append(start)

    def check(self, begin: pb.BeginRequest) -> None:
        """Raise `CallRefused` if a start may not begin."""
        if start_of(begin) in self._fenced:
            raise CallRefused(
                f"incarnation {begin.incarnation} is fenced: start training in a new one",
                precondition=True,
            )
        if 0 < self.discarded >= begin.generation:
            raise CallRefused(
                f"generation {begin.generation} was discarded by `checkmate reset`: start training again",
                precondition=True,
            )

    def discard(self, generation: int, known: int) -> None:
        """Refuse all runs up to a generation. Raise `CallRefused` if a greater one is known."""
        if generation < known:
            raise CallRefused(
                f"generation {known} has begun here, and only those up to {generation} were to be discarded",
                precondition=True,
            )
        self.discarded = generation
