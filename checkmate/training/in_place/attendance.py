"""This process's attendance of a meeting of the job's ranks, which shadow nodes host, and the ranks' store.

A process waits at all nodes at once. All ranks take the meeting of the first node in the job's order that all
of them reach, so a node that is away costs nothing. From then on the node tells which rank is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import grpc
from torch._C._distributed_c10d import Store  # torch.distributed's, where mypy finds it

from checkmate.base.wording import counted, in_ranges, shortened
from checkmate.errors import CheckmateError
from checkmate.job.partial import replicas_there
from checkmate.job.schema import Job, ShadowNode
from checkmate.nodes.standing import node_name
from checkmate.nodes.stubs import Stubs, reason, refusal
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL, START_BYTES, bounded
from checkmate.rpc.shadow_pb2_grpc import ShadowStub

_log: Final = logging.getLogger("checkmate")

PREFERENCE_SECONDS: Final = 1.0
"""Time that a meeting at an earlier node may take after all ranks have met at a later one."""
_AGAIN_SECONDS: Final = 0.25
_NEWS_SECONDS: Final = 5.0
_CALL_SECONDS: Final = 5.0
_TRIES: Final = 3
_TEXT_MAX: Final = 1000


class MeetingError(CheckmateError, RuntimeError):
    """The ranks have not met in time, or a rank can't go on. The message names it."""


class TrainingEnded(CheckmateError, RuntimeError):
    """Training has ended without this rank, which was waiting to take part again."""


class _Table:
    """One node at which this process waits."""

    def __init__(self, node: ShadowNode, stub: ShadowStub) -> None:
        self.node, self.stub = node, stub
        self.call: Any = None
        self.missing: Sequence[int] = ()
        """Ranks that have not come there."""
        self.meeting: pb.Meeting | None = None
        self.met_at = 0.0
        self.others_train = False
        """Whether others train there without this rank."""
        self.returned: Sequence[int] = ()
        """Ranks that wait to take part in its meeting, as it may say before the meeting is chosen."""
        self.why = ""
        """Why this process can't wait there, or "": it waits, or the node has not answered yet."""
        self.is_refused = False


class Attendance:
    """This process's place in one meeting, until `close`. It has a thread for each node that it waits at."""

    def __init__(self, job: Job, rank: int, stubs: Stubs, token: bytes, *, trained: bool) -> None:
        """Begin to wait.

        Args:
            job: The job.
            rank: This process's global rank.
            stubs: Stubs of the job's nodes. The caller closes them, after this.
            token: Random bytes that name this process.
            trained: Whether it has trained before, so that it has state that a new process lacks.
        """
        self._job = job
        self._rank = rank
        self._request = pb.MeetRequest(
            job=job.job, protocol=PROTOCOL, rank=rank, token=token, trained=trained
        )
        self._changed = threading.Condition()
        self._closing = False
        self._chosen: _Table | None = None
        self._loss: str | None = None
        self.lost_rank: int | None = None
        """The rank that has left the meeting, if one has."""
        self._verdict = ""
        self._is_done = False
        self.returned: Sequence[int] = ()
        """Ranks that were away and wait to take part: this process leaves the meeting after its iteration."""
        self._on_loss: Callable[[], None] = lambda: None
        self._on_return: Callable[[], None] = lambda: None
        self._tables = [_Table(node, stubs.to(node.id)) for node in job.shadow_nodes]
        self._threads = [
            threading.Thread(
                target=self._attend, args=(table,), name=f"meeting at node {table.node.id}", daemon=True
            )
            for table in self._tables
        ]
        for thread in self._threads:
            thread.start()

    @property
    def loss(self) -> str | None:
        """The rank that has left the meeting, and why, in words; `None` if none has, as far as is known."""
        return self._loss

    @property
    def verdict(self) -> str:
        """Why a rank has ended the job's training, in words, or ""."""
        return self._verdict

    @property
    def is_blind(self) -> bool:
        """Whether the node can't be heard, so that a rank may be lost that this process does not know of."""
        return self._chosen is not None and bool(self._chosen.why)

    def await_meeting(self, timeout: float) -> pb.Meeting:
        """Wait until all ranks have come, or enough; return the meeting.

        Args:
            timeout: In seconds, while no others train.

        Raises:
            MeetingError: They have not come; it names those that are missing.
            TrainingEnded: Others have trained to the end.
        """
        timeout += self._job.replacement_seconds or 0  # for which nodes wait before fewer replicas go on
        deadline = time.monotonic() + timeout
        news_at = time.monotonic() + _NEWS_SECONDS
        with self._changed:
            while (table := self._choice()) is None:
                if self._verdict:
                    raise MeetingError(f"training ends, because a rank can't go on: {self._verdict}")
                if self._is_done:
                    raise TrainingEnded("training has ended, with the ranks that were there")
                now = time.monotonic()
                if any(table.others_train and not table.why for table in self._tables):
                    deadline = now + timeout
                if now >= deadline or all(table.is_refused for table in self._tables):
                    raise MeetingError(self._unmet(timeout))
                if now >= news_at:
                    news_at = now + 2 * _NEWS_SECONDS
                    self._say_missing(deadline - now)
                self._changed.wait(min(deadline - now, _AGAIN_SECONDS))
            self._chosen, self.returned = table, table.returned
            calls = [spare.call for spare in self._tables if spare is not table and spare.call is not None]
            for call in calls:
                call.cancel()
        assert table.meeting is not None
        return table.meeting

    def await_loss(self, timeout: float) -> bool:
        """Wait until a rank is lost; return whether one is, or may be without this process hearing of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss or self._verdict or self.is_blind, timeout)
            return bool(self._loss or self.is_blind)

    def when_lost(self, act: Callable[[], None]) -> None:
        """Have a function called once, by another thread, when a rank is lost: at once if one is already."""
        with self._changed:
            self._on_loss = act
            lost = self._loss is not None or bool(self._verdict)
        if lost:
            threading.Thread(target=act, name="abort", daemon=True).start()

    def when_returned(self, act: Callable[[], None]) -> None:
        """Have a function called, by another thread, when ranks are back: at once if they are already."""
        with self._changed:
            self._on_return = act
            returned = self.returned
        if returned:
            act()

    def conclude(self, why: str = "") -> None:
        """Tell the others that this rank is done, or why it can't go on. Never raises; may be repeated."""
        if self._chosen is None or self._chosen.meeting is None:
            return
        request = pb.ConcludeRequest(
            job=self._job.job, meeting=self._chosen.meeting.id, rank=self._rank, why=shortened(why, _TEXT_MAX)
        )
        for _ in range(_TRIES):
            try:
                self._chosen.stub.Conclude(request, timeout=_CALL_SECONDS)
                return
            except grpc.RpcError as error:
                _log.debug("shadow node %d: %s", self._chosen.node.id, reason(error))
                if refusal(error) or self.is_blind:
                    return

    def await_all_done(self) -> bool:
        """Wait until all ranks have concluded; return false if one is lost before."""
        while True:
            with self._changed:
                is_told = self._changed.wait_for(
                    lambda: self._is_done or self._loss or self._verdict or self.is_blind, 2 * _CALL_SECONDS
                )
                if is_told:
                    return self._loss is None and not self._verdict
            self.conclude()  # the node may have been too busy to hear it

    def store(self, timeout: float) -> NodeStore:
        """Return the store of the meeting."""
        assert self._chosen is not None and self._chosen.meeting is not None
        return NodeStore(self._chosen.stub, self._job.job, self._chosen.meeting.id, timeout)

    def close(self) -> None:
        """Leave the meeting."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            calls = [table.call for table in self._tables if table.call is not None]
        for call in calls:
            call.cancel()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _choice(self) -> _Table | None:
        """Return the node whose meeting all ranks take, if it is known. The caller holds the lock."""
        others_train = any(table.others_train and not table.why for table in self._tables)
        for table in self._tables:
            if table.meeting is not None and not table.why:
                if others_train and len(table.meeting.ranks) < self._job.rank_count:
                    continue  # a node that does not know of those that train elsewhere
                now = time.monotonic()
                earlier = self._tables[: self._tables.index(table)]
                waiting = [candidate for candidate in earlier if not candidate.why]
                return table if not waiting or now >= table.met_at + PREFERENCE_SECONDS else None
        return None

    def _attend(self, table: _Table) -> None:
        """Wait at one node, and hear what it tells, until another node's meeting is taken."""
        while True:
            with self._changed:
                if self._closing or self._chosen not in (None, table) or table.meeting is not None:
                    return
                table.call = table.stub.Meet(self._request)
            why = "it has ended the call"
            try:
                for event in table.call:
                    if wrong := wrong_event(event, self._job, self._rank):
                        why, table.is_refused = f"its answer is not a shadow node's: {wrong}", True
                        table.call.cancel()
                        break
                    self._hear(table, event)
            except grpc.RpcError as error:
                why = reason(error)
                table.is_refused = bool(refusal(error))
            except ValueError:  # the channel is closed
                return
            with self._changed:
                table.why = why
                self._changed.notify_all()
                if table.is_refused or self._closing:
                    return
                self._changed.wait(_AGAIN_SECONDS)

    def _hear(self, table: _Table, event: pb.MeetEvent) -> None:
        act: Callable[[], None] | None = None
        again = False
        with self._changed:
            table.why = ""
            match event.WhichOneof("kind"):
                case "waiting":
                    table.missing = list(event.waiting.ranks)
                    table.others_train = event.waiting.others_train
                case "returned":
                    table.returned = list(event.returned.ranks)
                    if self._chosen is table:
                        self.returned, act = table.returned, self._on_return
                case "meeting":
                    table.meeting, table.met_at, table.missing = event.meeting, time.monotonic(), ()
                    table.others_train, table.returned = False, ()
                case "lost" if event.lost.rank == self._rank:
                    self._verdict = f"rank {self._rank}: another process has taken its place"
                    act = self._on_loss
                case "lost" if self._chosen is table and self._loss is None:
                    self.lost_rank = event.lost.rank
                    self._loss = f"rank {event.lost.rank}: {shortened(event.lost.why, _TEXT_MAX)}"
                    act = self._on_loss
                case "lost" if self._chosen is None:  # over before it was taken: come again
                    table.meeting, table.why = None, "a rank has left its meeting"
                    again = True
                case "concluded" if not event.concluded.why:
                    self._is_done = True
                case "concluded" if self._chosen in (None, table):
                    why = shortened(event.concluded.why, _TEXT_MAX)
                    self._verdict = f"rank {event.concluded.rank}: {why}"
                    act = self._on_loss
            self._changed.notify_all()
        if act is not None:
            act()
        if again:
            table.call.cancel()

    def _unmet(self, timeout: float) -> str:
        """Return why the ranks have not met, in words."""
        tables = [
            f"{node_name(self._job, table.node.id)}: {table.why or _waits(table)}" for table in self._tables
        ]
        return (
            f"the ranks have not met within {timeout:g} s: {'; '.join(tables)}. Each rank needs a "
            "process that runs the script: `checkmate launch` starts it again, torchrun "
            "only with an agent for each rank (`checkmate docs training`)"
        )

    def _say_missing(self, seconds: float) -> None:
        """Log for whom this process waits, on the first rank of those that do."""
        missing = next((table.missing for table in self._tables if not table.why and table.missing), ())
        if missing and self._rank == min(set(range(self._rank + 1)) - set(missing), default=self._rank):
            _log.info("waiting up to %.0f s for %s", seconds, _ranks(missing))


def wrong_event(event: pb.MeetEvent, job: Job, rank: int) -> str:
    """Return what is wrong with what a node tells of a whole job's ranks to one of them, or ""."""
    if wrong := bounded(event):
        return wrong
    kind = event.WhichOneof("kind")
    lists: tuple[Sequence[int], ...] = {
        "waiting": (event.waiting.ranks,),
        "returned": (event.returned.ranks,),
        "meeting": (event.meeting.ranks, event.meeting.trained),
    }.get(kind or "", ())
    job_numbers = {member.rank for group in job.dp_groups for member in group.ranks}
    for ranks in lists:
        if len(set(ranks)) < len(ranks) or not job_numbers.issuperset(ranks):
            return f"it names {counted(len(ranks), 'rank')}, of which the job does not have one, or one twice"
    if kind != "meeting":
        return ""
    ranks = event.meeting.ranks
    if len(event.meeting.id) != START_BYTES or not {rank, *event.meeting.trained} <= set(ranks):
        return f"a meeting without rank {rank}, or without a name"
    replicas = len(replicas_there(job, frozenset(ranks)))
    total = len(job.dp_groups[0].ranks)
    if not (job.min_replicas or total) <= replicas or replicas * len(job.dp_groups) != len(ranks):
        return f"a meeting of {counted(len(ranks), 'rank')}, which are not all of the replicas that it needs"
    return ""


def _waits(table: _Table) -> str:
    return f"waiting for {_ranks(table.missing)}" if table.missing else "it has not answered"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {in_ranges(list(numbers))}"


class NodeStore(Store):
    """A meeting's store on a shadow node, by which process groups meet (`torch.distributed.Store`).

    Operations fail once the meeting is over, so nobody waits for a rank that is lost.
    """

    def __init__(self, stub: ShadowStub, job: str, meeting: bytes, timeout: float) -> None:
        super().__init__()
        self._stub, self._job, self._meeting = stub, job, meeting
        self._seconds = timeout
        self.published: list[bytes] = []
        """Values that this process has set: among them the addresses at which its process groups listen."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.published.append(data)
        self._ask(pb.StoreRequest.SET, [key], [data])

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
        return self._get([key], self._seconds)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        return int(self._ask(pb.StoreRequest.ADD, [key], amount=amount).amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it is the expected one; return what it is then."""
        values = [value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired)]
        return self._ask(pb.StoreRequest.SWAP, [key], values).values[0]

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        return self._ask(pb.StoreRequest.DELETE, [key]).present

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask(pb.StoreRequest.COUNT, []).amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return self._ask(pb.StoreRequest.CHECK, list(dict.fromkeys(keys))).present

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._get(keys, self._seconds if timeout is None else timeout.total_seconds())

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, or set it."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(pb.StoreRequest.APPEND, [key], [data])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return values, once all are there."""
        return self._get(keys, self._seconds)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set values."""
        data = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        self.published += data
        self._ask(pb.StoreRequest.SET, keys, data)

    def has_extended_api(self) -> bool:
        """Return that it has `append`, `multi_get` and `multi_set`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""
        self._seconds = timeout.total_seconds()

    def _get(self, keys: list[str], seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            reply = self._ask(pb.StoreRequest.GET, list(dict.fromkeys(keys)), timeout=remaining)
            if reply.present:
                values = dict(zip(dict.fromkeys(keys), reply.values, strict=True))
                return [values[key] for key in keys]
        raise MeetingError(f"no value for {', '.join(keys[:3])} within {seconds:g} s")

    def _ask(
        self,
        kind: pb.StoreRequest.Kind.ValueType,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        *,
        amount: int = 0,
        timeout: float = 0.0,
    ) -> pb.StoreReply:
        request = pb.StoreRequest(
            job=self._job,
            meeting=self._meeting,
            kind=kind,
            keys=keys,
            values=values,
            amount=amount,
            timeout=timeout,
        )
        try:
            return self._stub.Store(request, timeout=2 * _CALL_SECONDS)
        except (grpc.RpcError, ValueError) as error:
            raise MeetingError(f"the meeting's store: {reason(error)}") from None
