"""The phases of a node: of a restart, and of leaving its job. Pure.

Two holders of a shard could be asked to leave at the same moment (`checkmate drain`). So a node leaves in two
steps: first it no longer counts as a live holder, which everybody sees; then it goes, if another holder still
counted after that. In between it goes on to step, so it can stay.
"""

from __future__ import annotations

import enum
from typing import Final

from checkmate.shadow.logic.group import CallRefused

UNDECIDED_SECONDS: Final = 10.0
"""Time between the steps after which a node stays."""

LEFT_TROUBLE: Final = "it was drained, and holds nothing until it is restarted"


class Phase(enum.IntEnum):
    """Progress of a restart on a node."""

    OPEN = 0
    DRAINING = 1
    """Recorded iterations are committed and stepped; known starts of training cannot begin again."""
    DRAINED = 2
    """As while draining, and no data has arrived for a while."""
    FENCED = 3
    """Nothing more is committed."""
    ANSWERED = 4
    """The status was returned, and does not change until the next `Fence` or `Begin`."""


class Leaving:
    """Whether a node stays, is about to leave, or has left."""

    def __init__(self) -> None:
        self.has_left = False
        self._until: float | None = None
        self._token = b""

    @property
    def undecided(self) -> bool:
        """Whether the node is about to leave, and does not count as a live holder."""
        return self._until is not None

    def ask(self, now: float, token: bytes) -> None:
        """Take the first step, in the place of an earlier one."""
        self._until, self._token = now + UNDECIDED_SECONDS, token

    def may_go(self, token: bytes) -> bool:
        """Return whether the second step follows the first one with this token, or was taken already."""
        return self.has_left or (self.undecided and token == self._token)

    def stay(self) -> bool:
        """Take the first step back. Return whether there was one."""
        was_undecided, self._until = self.undecided, None
        return was_undecided

    def expired(self, now: float) -> bool:
        """Return whether the second step has not come in time."""
        return self._until is not None and now > self._until

    def go(self) -> None:
        """Take the second step, for good."""
        self._until, self.has_left = None, True

    def check_here(self) -> None:
        """Raise `CallRefused` if the node has left."""
        if self.has_left:
            raise CallRefused(LEFT_TROUBLE, precondition=True)
