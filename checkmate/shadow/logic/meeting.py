"""Meetings of a job's ranks, for recovery in place: who has come, who is lost, and their store. Pure.

All ranks of a job meet before they train. A rank that leaves ends the meeting, and the others hear of it.
Then all meet again: those that are left, and a new process in the lost rank's place. If the job may go on
with fewer replicas of its model, they wait for that process for a while only. Whoever comes later waits until
its replica is complete; then the others hear of it, and leave.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import START_BYTES
from checkmate.shadow.logic.group import CallRefused

GONE: Final = "its process has ended, or its host is away"
LEFT: Final = "it has left the meeting"
REPLACED: Final = "another process has taken its place"
MAX_STORE: Final = 64 << 20
"""Bytes of a store's keys and values, beside those for each rank."""
MAX_STORE_OF_RANK: Final = 64 << 10
_KEY_BYTES: Final = 128
"""What an entry counts beside its text and value."""


@dataclass(eq=False)
class Seat:
    """One process's place in a meeting, from its call to the call's end."""

    rank: int
    token: bytes
    """Of the process."""
    trained: bool
    """Whether it has trained in an earlier meeting."""
    session: Session | None = None
    """The meeting, once all ranks have come."""
    is_done: bool = False
    events: list[pb.MeetEvent] = field(default_factory=list)
    """Events for the process that it has not taken yet."""

    def take(self) -> list[pb.MeetEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events


@dataclass(eq=False)
class Session:
    """A meeting of all ranks, until one is lost."""

    id: bytes
    seats: dict[int, Seat]
    store: RankStore
    over: str = ""
    """Why it is over, in words, or ""."""
    has_heard: frozenset[int] = frozenset()
    """Ranks that were away, and of which it has heard that they are back."""

    def end(self, why: str, event: pb.MeetEvent) -> None:
        """End it, and tell all."""
        self.over = self.over or why
        for seat in self.seats.values():
            seat.events.append(event)


@dataclass(frozen=True)
class Quorum:
    """With whom a meeting may begin, if not all ranks have come."""

    replicas: Sequence[frozenset[int]]
    """The ranks of each replica of the model, all of which take part or none."""
    least: int
    """The number of replicas."""
    seconds: float
    """How long after the last rank that came."""


class Meetings:
    """The meetings of one job on one node: at most one that has begun, and one that gathers."""

    def __init__(self, ranks: Collection[int], quorum: Quorum | None = None) -> None:
        """Create it. `quorum`: by default, a meeting is of all ranks."""
        self._ranks: Final = frozenset(ranks)
        self._quorum = quorum
        self._awaited = self._ranks
        """Those for whom others wait for a while: the ranks of the meeting before."""
        self._came_at = 0.0
        self._gathered: dict[int, Seat] = {}
        self._session: Session | None = None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come to the meeting that gathers."""
        return sorted(self._ranks - self._gathered.keys())

    @property
    def others_train(self) -> bool:
        """Whether a meeting goes on without those that wait."""
        return self._session is not None and not self._session.over

    def sit(self, rank: int, token: bytes, *, trained: bool, now: float = 0.0) -> Seat:
        """Have a process wait for all others. Raise `CallRefused` if the job does not have its rank."""
        if rank not in self._ranks:
            raise CallRefused(f"rank {rank} is not in the job")
        self._came_at = now
        seat = Seat(rank, token, trained)
        session = self._session
        if session is not None and (seated := session.seats.get(rank)) is not None:
            why = LEFT if seated.token == token else REPLACED
            self._lose(seated, why)
        if (seated := self._gathered.get(rank)) is not None:
            seated.events.append(_lost(rank, REPLACED))
        self._gathered[rank] = seat
        self.tick(now)
        return seat

    def tick(self, now: float) -> bool:
        """Begin the meeting that gathers, if nobody is to be waited for, or tell those that train of it.

        Return whether either has happened.
        """
        gathered = self._gathered.keys()
        if gathered >= self._ranks:
            self._begin(self._ranks)
            return True
        if self._quorum is None:
            return False
        complete = [replica for replica in self._quorum.replicas if replica <= gathered]
        ranks = frozenset[int]().union(*complete)
        if self.others_train:
            assert self._session is not None
            if not complete or self._session.has_heard >= ranks:
                return False
            self._session.has_heard |= ranks
            returned = pb.MeetEvent(returned=pb.Returned(ranks=sorted(ranks)))
            for seat in self._session.seats.values():
                seat.events.append(returned)
            return True
        is_awaited = not gathered >= self._awaited and now < self._came_at + self._quorum.seconds
        if len(complete) < self._quorum.least or is_awaited:
            return False
        self._begin(ranks)
        return True

    def leave(self, seat: Seat) -> None:
        """Note that a process's call has ended."""
        if self._gathered.get(seat.rank) is seat:
            del self._gathered[seat.rank]
        self._lose(seat, GONE)

    def conclude(self, meeting: bytes, rank: int, why: str) -> None:
        """Note that a rank is done, or why it can't go on. Raise `CallRefused` if the meeting is over."""
        session = self.session(meeting)
        if why:
            concluded = pb.MeetEvent(concluded=pb.Concluded(rank=rank, why=why))
            session.end(f"rank {rank} can't go on: {why}", concluded)
            for seat in self._gathered.values():
                seat.events.append(concluded)
            return
        if rank in session.seats:
            session.seats[rank].is_done = True
        if all(seat.is_done for seat in session.seats.values()):
            concluded = pb.MeetEvent(concluded=pb.Concluded(rank=rank))
            session.end("all ranks are done", concluded)
            for seat in self._gathered.values():  # that would have taken part later
                seat.events.append(concluded)

    def session(self, meeting: bytes) -> Session:
        """Return a meeting. Raise `CallRefused` if it is over."""
        session = self._session
        if session is None or session.id != meeting:
            raise CallRefused("this meeting is over: another one has begun", precondition=True)
        if session.over:
            raise CallRefused(f"this meeting is over: {session.over}", precondition=True)
        return session

    def _begin(self, ranks: frozenset[int]) -> None:
        """Begin the meeting of these ranks, which have come; the others wait on."""
        most = MAX_STORE + MAX_STORE_OF_RANK * len(self._ranks)
        seats = {rank: seat for rank, seat in self._gathered.items() if rank in ranks}
        session = Session(secrets.token_bytes(START_BYTES), seats, RankStore(most))
        self._gathered = {rank: seat for rank, seat in self._gathered.items() if rank not in ranks}
        self._session, self._awaited = session, ranks
        trained = sorted(rank for rank, seat in session.seats.items() if seat.trained)
        event = pb.MeetEvent(meeting=pb.Meeting(id=session.id, trained=trained, ranks=sorted(ranks)))
        for seat in session.seats.values():
            seat.session = session
            seat.events.append(event)

    def _lose(self, seat: Seat, why: str) -> None:
        """End the meeting of a process that has left it, unless that is over."""
        session = seat.session
        if session is None or session.seats.get(seat.rank) is not seat:
            return
        del session.seats[seat.rank]
        if why == REPLACED:
            seat.events.append(_lost(seat.rank, why))
        if not session.over:
            session.end(f"rank {seat.rank}: {why}", _lost(seat.rank, why))


def _lost(rank: int, why: str) -> pb.MeetEvent:
    return pb.MeetEvent(lost=pb.Lost(rank=rank, why=why))


class RankStore:
    """The keys and values of a meeting, with the semantics of `torch.distributed.Store`."""

    def __init__(self, most: int) -> None:
        """Create it empty. `most`: bytes of all keys and values."""
        self._values: dict[str, bytes] = {}
        self._most, self._nbytes = most, 0

    def __len__(self) -> int:
        return len(self._values)

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return all(key in self._values for key in keys)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are there."""
        return [self._values[key] for key in keys]

    def nbytes(self, keys: Sequence[str]) -> int:
        """Return the bytes of the values of keys, of those that are there."""
        return sum(len(self._values.get(key, b"")) for key in keys)

    def set(self, key: str, value: bytes) -> None:
        """Set a value. Raise `CallRefused` if there is not room enough."""
        before = self._values.get(key)
        added = len(value) - len(before) if before is not None else len(value) + len(key) + _KEY_BYTES
        if added > 0 and self._nbytes + added > self._most:
            raise CallRefused(f"the meeting's store may have {self._most} bytes, and has {self._nbytes}")
        self._nbytes += added
        self._values[key] = value

    def append(self, key: str, value: bytes) -> None:
        """Append to a value, or set it."""
        self.set(key, self._values.get(key, b"") + value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 before the first time, and return it."""
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise CallRefused(f"{key[:100]} is not a number") from None
        self.set(key, str(total).encode())
        return total

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value if it is the expected one, or absent and none is expected. Return what it is then."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self.set(key, desired)
            return desired
        return expected if present is None else present

    def delete(self, key: str) -> bool:
        """Delete a value. Return whether there was one."""
        value = self._values.pop(key, None)
        if value is not None:
            self._nbytes -= len(value) + len(key) + _KEY_BYTES
        return value is not None
