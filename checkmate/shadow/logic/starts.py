"""The starts of training that may not begin on a shadow node: ended by a restart, or discarded. Pure.

Also those that another one has fenced or replaced: trainers of a start that has crashed are dead by then.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import GENERATIONS_AHEAD
from checkmate.shadow.logic.group import CallRefused, Start, start_of

_REMEMBERED: Final = 64

LATE_SECONDS, APART_SECONDS = 5.0, 1.0
"""A superseded start goes on if records come so long after that, and again so long after the first ones.

What dying trainers have sent is read within a moment, because the node's clock stands while its process does.
After a break in the network, it may come later, but all at once.
"""
SILENT_SECONDS: Final = 120.0
"""A superseded start of which nothing has come for this time has ended."""
_MAX_HOSTS: Final = 64
"""Addresses that are remembered."""


class StartEnded(CallRefused):
    """A start of training may not begin, because a restart has ended it."""

    def __init__(self, begin: pb.BeginRequest) -> None:
        super().__init__(
            f"incarnation {begin.incarnation} is fenced: start training in a new one", precondition=True
        )


class EndedStarts:
    """Starts that a restart has ended (`drain`, `fence`) or `checkmate reset` has discarded."""

    def __init__(self) -> None:
        self.discarded = 0
        """The greatest generation that was discarded; 0: none."""
        self._fenced: deque[Start] = deque(maxlen=_REMEMBERED)

    def end(self, start: Start) -> None:
        """Refuse a start from now on."""
        if start not in self._fenced:
            self._fenced.append(start)

    def check(self, begin: pb.BeginRequest, greatest: int) -> None:
        """Raise `CallRefused` if a start may not begin. `greatest`: the greatest generation known here."""
        _check_ahead(begin.generation, greatest)
        if start_of(begin) in self._fenced:
            raise StartEnded(begin)
        if 0 < self.discarded >= begin.generation:
            raise CallRefused(
                f"generation {begin.generation} was discarded by `checkmate reset`: start training again",
                precondition=True,
            )

    def discard(self, generation: int, greatest: int) -> None:
        """Refuse all runs up to a generation. Raise `CallRefused` if it is below `greatest`, or far above."""
        _check_ahead(generation, greatest)
        if generation < greatest:
            raise CallRefused(
                f"generation {greatest} has begun here, and only those up to {generation} were to be "
                "discarded",
                precondition=True,
            )
        self.discarded = generation


def _check_ahead(generation: int, greatest: int) -> None:
    """Raise `CallRefused` for a generation that no run has reached: all later runs would be refused."""
    if generation > greatest + GENERATIONS_AHEAD:
        raise CallRefused(
            f"generation {generation}: more than {GENERATIONS_AHEAD} beyond generation {greatest}, the "
            "greatest one here; another shadow node has answered nonsense"
        )


@dataclass
class Superseded:
    """A start that another one has fenced, or in whose place it has begun; at which time, and from where."""

    since: float
    by: str
    late: float = math.inf
    """Time of the first late record since the newest start began here."""
    goes_on: bool = False
    """Whether its trainers go on, since then."""
    hosts: dict[str, float] = field(default_factory=dict)
    """Addresses from which late records come, and when they came last."""


@dataclass
class OlderStarts:
    """Starts that other ones have superseded, and whether they go on."""

    _starts: dict[tuple[int, str, bytes], Superseded] = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        """Addresses from which records of starts that go on have come since the newest start began here."""
        return list(
            dict.fromkeys(host for start in self._starts.values() if start.goes_on for host in start.hosts)
        )

    def end(self, begin: pb.BeginRequest, by: str, now: float) -> None:
        """Note that a start is superseded, from the address `by`, unless that is known."""
        if self.find(begin) is None:
            while len(self._starts) >= _REMEMBERED:
                del self._starts[next(iter(self._starts))]
            self._starts[_key(begin)] = Superseded(now, by)

    def note_newest(self) -> None:
        """Note that a new start has begun: what was noticed during another one tells nothing about it."""
        for start in self._starts.values():
            start.late, start.goes_on = math.inf, False
            start.hosts.clear()

    def forget(self, now: float) -> None:
        """Forget addresses from which nothing has come for long."""
        for start in self._starts.values():
            for host in [host for host, last in start.hosts.items() if now - last > SILENT_SECONDS]:
                del start.hosts[host]

    def find(self, message: pb.BeginRequest | pb.RecordPart) -> Superseded | None:
        """Return the start to which a message belongs, if it is superseded."""
        return self._starts.get(_key(message))

    def hear_record(self, start: Superseded, host: str, now: float) -> bool:
        """Note a record of a superseded start. Return whether it is the first that shows that it goes on."""
        if now < start.since + LATE_SECONDS:
            return False
        start.late = min(start.late, now)
        if host in start.hosts or len(start.hosts) < _MAX_HOSTS:
            start.hosts[host] = now
        first = not start.goes_on and now >= start.late + APART_SECONDS
        start.goes_on |= first
        return first


def _key(message: pb.BeginRequest | pb.RecordPart) -> tuple[int, str, bytes]:
    return (message.incarnation, message.run, message.start)
