"""`Meet`, `Store` and `Conclude`: ranks meet here for recovery in place (design, section 7, *In place*)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from checkmate.job.schema import Job
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import ANSWER_BYTES, REFUSAL_MAX
from checkmate.shadow import locks
from checkmate.shadow.logic.bounds import check_number, check_protocol, check_seconds, check_start, check_text
from checkmate.shadow.logic.group import CallRefused, check_job
from checkmate.shadow.logic.meeting import Meetings, Quorum, RankStore, Seat

REPLACEMENT_SECONDS: Final = 60
"""How long ranks wait for lost ones, unless the job file says otherwise, before they go on without."""
NEWS_SECONDS: Final = 1.0
"""How often ranks that wait hear for whom."""
MAX_WAIT_SECONDS: Final = 5.0
"""The longest that a `GET` waits; the caller asks again."""
MAX_KEYS: Final = 4096
MAX_KEY: Final = 1024
"""Characters of a key."""
MAX_VALUE: Final = 1 << 20
"""Bytes of a value."""
MAX_AMOUNT: Final = 1 << 40


class MeetingRoom:
    """The owner of a node's meetings and of their lock."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._meetings = Meetings(
            {rank.rank for group in job.dp_groups for rank in group.ranks}, quorum_of(job)
        )
        self._changed = threading.Condition(locks.ordered_lock("meeting"))
        self._stopping = False

    def stop(self) -> None:
        """End all calls that wait."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def meet(
        self,
        request: pb.MeetRequest,
        is_active: Callable[[], bool],
        on_end: Callable[[Callable[[], None]], object],
    ) -> Iterator[pb.MeetEvent]:
        """Yield what happens to a process's meeting, until its call ends.

        Args:
            request: The process.
            is_active: Returns whether its call goes on.
            on_end: Has a function called once the call has ended.

        Raises:
            CallRefused: The request is not one of this job's ranks.
        """
        check_job(self._job, request.job)
        check_protocol(request.protocol)
        check_start("token", request.token)
        with self._changed:
            now = time.monotonic()
            seat = self._meetings.sit(request.rank, request.token, trained=request.trained, now=now)
            self._changed.notify_all()
        on_end(self._notify)
        last_waiting = pb.Waiting()
        try:
            while is_active() and not self._stopping:
                with self._changed:
                    if seat.session is None and self._meetings.tick(time.monotonic()):
                        self._changed.notify_all()
                    events = seat.take()
                    missing = [] if events or seat.session else self._meetings.missing
                    waiting = pb.Waiting(ranks=missing, others_train=self._meetings.others_train)
                if missing and waiting != last_waiting:
                    events.append(pb.MeetEvent(waiting=waiting))
                    last_waiting = waiting
                yield from events
                self._await_news(seat, is_active)
        finally:
            with self._changed:
                self._meetings.leave(seat)
                self._changed.notify_all()

    def _await_news(self, seat: Seat, is_active: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: seat.events or self._stopping or not is_active(),
                None if seat.session else NEWS_SECONDS,
            )

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def store(self, request: pb.StoreRequest) -> pb.StoreReply:
        """Carry out an operation on a meeting's store. Raise `CallRefused` if the meeting is over."""
        check_job(self._job, request.job)
        _check_store(request)
        with self._changed:
            store = self._meetings.session(request.meeting).store
            if request.kind == pb.StoreRequest.GET:
                self._changed.wait_for(
                    lambda: store.has(request.keys) or self._stopping or self._is_over(request.meeting),
                    min(request.timeout, MAX_WAIT_SECONDS),
                )
                self._meetings.session(request.meeting)
            reply = _carry_out(store, request)
            self._changed.notify_all()
        return reply

    def conclude(self, request: pb.ConcludeRequest) -> pb.ConcludeReply:
        """Take note that a rank is done, or can't go on. Raise `CallRefused` if the meeting is over."""
        check_job(self._job, request.job)
        check_text("why", request.why, REFUSAL_MAX)
        with self._changed:
            self._meetings.conclude(request.meeting, request.rank, request.why)
            self._changed.notify_all()
        return pb.ConcludeReply()

    def _is_over(self, meeting: bytes) -> bool:
        try:
            self._meetings.session(meeting)
        except CallRefused:
            return True
        return False


def quorum_of(job: Job) -> Quorum | None:
    """Return with whom a job's ranks may meet if some are away; `None`: all have to come."""
    if job.min_replicas is None:
        return None
    replicas = [
        frozenset(group.ranks[position].rank for group in job.dp_groups)
        for position in range(len(job.dp_groups[0].ranks))
    ]
    return Quorum(replicas, job.min_replicas, job.replacement_seconds or REPLACEMENT_SECONDS)


def _check_store(request: pb.StoreRequest) -> None:
    """Refuse what no process group of PyTorch asks a store for."""
    kinds = pb.StoreRequest
    check_number("the number of keys", len(request.keys), MAX_KEYS, 0 if request.kind == kinds.COUNT else 1)
    check_number("the amount", request.amount, MAX_AMOUNT, -MAX_AMOUNT)
    check_seconds("timeout", request.timeout, 1e9)
    if len(set(request.keys)) < len(request.keys):
        raise CallRefused("a key is there twice")
    for key in request.keys:
        check_text("a key", key, MAX_KEY)
    for value in request.values:
        check_number("the bytes of a value", len(value), MAX_VALUE)
    value_count = {kinds.SET: len(request.keys), kinds.APPEND: 1, kinds.SWAP: 2}.get(request.kind, 0)
    check_number("the number of values", len(request.values), value_count, value_count)


def _carry_out(store: RankStore, request: pb.StoreRequest) -> pb.StoreReply:
    keys, values = list(request.keys), list(request.values)
    kinds = pb.StoreRequest
    match request.kind:
        case kinds.SET:
            for key, value in zip(keys, values, strict=True):
                store.set(key, value)
            return pb.StoreReply(present=True)
        case kinds.GET:
            if not store.has(keys):
                return pb.StoreReply()
            check_number("the bytes of all values", store.nbytes(keys), ANSWER_BYTES)
            return pb.StoreReply(present=True, values=store.get(keys))
        case kinds.ADD:
            return pb.StoreReply(present=True, amount=store.add(keys[0], request.amount))
        case kinds.SWAP:
            return pb.StoreReply(present=True, values=[store.swap(keys[0], *values)])
        case kinds.DELETE:
            return pb.StoreReply(present=store.delete(keys[0]))
        case kinds.CHECK:
            return pb.StoreReply(present=store.has(keys))
        case kinds.COUNT:
            return pb.StoreReply(present=True, amount=len(store))
        case kinds.APPEND:
            check_number("the bytes of a value", store.nbytes(keys) + len(values[0]), MAX_VALUE)
            store.append(keys[0], values[0])
            return pb.StoreReply(present=True)
        case _:
            raise CallRefused(f"a store has no operation {request.kind}")
