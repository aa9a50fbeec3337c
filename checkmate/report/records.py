"""The records of a report. Times are RFC 3339, each by the clock of the host that it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Death:
    """A process that has ended without saying so."""

    who: str
    host: str
    pid: int
    last: str
    """The time of its last event; empty if none is known."""
    noticed: str
    """The time at which another process noticed it; empty if none did."""
    by: str
    """The process that noticed it first, and its message."""
    back: str
    """The time at which it has begun again, or another controller was primary; empty if there is none."""


@dataclass(frozen=True)
class RecoveryStep:
    """A step of a recovery: `seconds` of the slowest process, and which one that was."""

    name: str
    seconds: float
    who: str


@dataclass(frozen=True)
class Recovery:
    """A start of training: of its first rank's call of `restore` or `protect`, to the first iteration."""

    time: str
    incarnation: int | None
    after: str
    """Its cause: the last death or broken ring before it; empty if there was none."""
    source: str
    """`nodes`, `disk` or `start`; empty if it is not known, or `failed`."""
    why: str
    """The reason why it has failed, or could not use the shadow nodes; empty if it could."""
    committed: int | None
    """The last iteration that was committed before it, as the fenced nodes have said."""
    next: int | None
    """The iteration with which training went on."""
    trained: int | None
    """The last iteration that ranks have completed before it, as they have said."""
    repeated: int | None
    """The number of iterations that were completed before, and trained again."""
    first: str
    """The time at which its first iteration was done; empty if none is known."""
    steps: list[RecoveryStep]


@dataclass(frozen=True)
class Absence:
    """A time in which no live node was known to hold a shard."""

    group: int
    shard: int
    since: str
    until: str
    """Empty if it lasts."""


@dataclass(frozen=True)
class Trouble:
    """Lost gradients, a shard that differs, or another problem that a process has named."""

    time: str
    who: str
    event: str
    message: str


@dataclass(frozen=True)
class NodeClock:
    """How far a node's clock is ahead of this host's, in seconds, and the most by which that is wrong."""

    node: int
    ahead: float
    within: float


@dataclass(frozen=True)
class JobReport:
    """The incidents of a job since a time."""

    job: str
    since: str
    until: str
    deaths: list[Death]
    stopped: list[str]
    """The processes that were stopped in order, with the time."""
    recoveries: list[Recovery]
    absences: list[Absence]
    troubles: list[Trouble]
    committed: int | None
    """The last iteration that a node is known to have committed, or stepped in full when it was fenced."""
    unknown: list[str]
    """The gaps in what is known, and what would fill them."""
    clocks: list[NodeClock]
    events: list[dict[str, Any]] = field(default_factory=list)
    """All events, by time."""
