"""When a line asks its node what it lacks of this rank's streams, and what it tells it with that. Pure."""

from __future__ import annotations

import math
from typing import Final

from checkmate.rpc import shadow_pb2 as pb

SOON_SECONDS: Final = 0.005
"""Until a question after a record or a repair."""
AGAIN_SECONDS: Final = 0.05
"""Until the next question while the node awaits copies."""


class Questions:
    """The questions of one line: one at a time, as a stopped node would find many before its records.

    A record or a repair has one asked soon, and the next ones follow while the node awaits copies. Then there
    is none until the next record. The line's thread asks and hears answers, and any thread tells of repairs;
    so the line's lock is held for each call, and no call waits.
    """

    def __init__(self, author: pb.RecordPart | None) -> None:
        """Create it. `author`: the fields that all parts of the rank share; `None` if nothing is asked."""
        self._author = author
        self._repaired: list[pb.RepairedRange] = []
        """What was sent again, and the node has not been told."""
        self._due_at = 0.0
        self._is_open = False
        """Whether one is not answered yet."""
        self._has_recorded = False
        """Whether a record was sent since the last one."""

    def begin_again(self) -> None:
        """Note that there is another connection, on which nothing was asked. The first question is due."""
        self._is_open, self._due_at = False, 0.0

    def note_record(self, now: float) -> None:
        """Note that a record is sent."""
        self._has_recorded = True
        self._due_at = min(self._due_at, now + SOON_SECONDS)

    def note_repaired(self, repaired: pb.RepairedRange) -> None:
        """Note what was sent again: the node is told at once, or once it has answered."""
        self._repaired.append(repaired)
        self._due_at = 0.0

    def seconds_left(self, now: float) -> float:
        """Return the time until a question; infinite if something has to happen before."""
        if self._author is None or self._is_open:
            return math.inf
        return max(self._due_at - now, 0.0)

    def ask(self, now: float) -> pb.RecordPart | None:
        """Return the question, if it is due. It counts as asked."""
        if self._author is None or self.seconds_left(now) > 0:
            return None
        self._is_open, self._has_recorded = True, False
        repaired, self._repaired = self._repaired, []
        self._due_at = now + (SOON_SECONDS if repaired else AGAIN_SECONDS)
        part = pb.RecordPart(iteration=-1, repair=pb.RepairTalk(repaired=repaired))
        part.MergeFrom(self._author)
        return part

    def hear_answer(self, *, awaits_copies: bool) -> None:
        """Note an answer, and whether the node awaits what this rank has sent."""
        self._is_open = False
        if not (awaits_copies or self._repaired or self._has_recorded):
            self._due_at = math.inf
