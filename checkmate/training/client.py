"""A trainer's line to one shadow node: records go out in the background, whatever becomes of the node.

One thread a node. Records wait in a bounded queue until they are answered, so that a connection that broke
costs none; where a node is away for long, the oldest are dropped. Answers cost processor time at both ends,
more than a record does: where a node wants nothing, few are asked for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.schema import Job, ShadowNode

_log: Final = logging.getLogger("checkmate")

QUEUED: Final = 256
BEGIN_SECONDS: Final = 20.0
ANSWERED_EVERY: Final = 4
"""Every so many records, one asks for an answer;"""
ATTENTIVE: Final = 16
"""and each of the first so many after a connect, or after a node has asked for something."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 1.0


class Line:
    """Talks to one shadow node until `close`. `begin`: what the group's first rank says at each connect."""

    def __init__(
        self,
        node: ShadowNode,
        stub: ShadowStub,
        begin: Callable[[], pb.BeginRequest] | None,
        on_reply: Callable[[int, pb.RecordReply], None],
        on_begun: Callable[[pb.BeginRequest], None] = lambda request: None,
    ) -> None:
        """`on_begun` is told what the node has accepted, before it is sent records."""
        self.node = node
        self.stub = stub
        self.begun = threading.Event()
        """Set once the node has accepted `begin`, or need not."""
        self._begin = begin
        self._on_reply = on_reply
        self._on_begun = on_begun
        self._parts: deque[pb.RecordPart] = deque()
        self._sent = 0  # of them, on the present connection
        self._calls = 0
        self._calm = 0  # records since the node wanted something
        self._asked = 0  # answers, on the present connection
        self._over = 0  # the connection that has ended
        self._finishing = False
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._dropped = False
        self._complaint = ""
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"shadow node {node.id}", daemon=True)

    def start(self) -> None:
        """Connect, and stay connected."""
        self._thread.start()

    def send(self, part: pb.RecordPart) -> None:
        """Queue a record; never waits."""
        with self._changed:
            self._parts.append(part)
            if len(self._parts) > QUEUED:
                self._drop_oldest()
            self._changed.notify_all()

    def unanswered(self) -> int:
        """How many records the node has not answered."""
        return len(self._parts)

    @property
    def connected(self) -> bool:
        """Whether the node answers."""
        return self.begun.is_set() and not self._complaint

    def finish(self, timeout: float) -> bool:
        """Nothing follows: wait until the node has every record, as far as `timeout` seconds allow."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._parts, timeout)

    def close(self) -> None:
        """End the thread, if it was started; what is still queued is lost."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._call is not None:
            self._call.cancel()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            why = "it ended the connection"
            try:
                if self._talk():
                    return
            except grpc.RpcError as error:
                why = reason(error)
            except grpc.FutureCancelledError:
                return  # closed
            pause = min(2 * pause, _LONGEST_PAUSE) if self._complaint else _FIRST_PAUSE
            self._lost(why)
            self._closing.wait(pause)

    def _talk(self) -> bool:
        """One connection, to its end; whether the node has all that it ever gets."""
        if self._begin is not None:
            request = self._begin()
            self._call = self.stub.Begin.future(request, timeout=BEGIN_SECONDS)
            if self._closing.is_set():
                self._call.cancel()
            for warning in self._call.result().warnings:
                _log.warning("shadow node %d: %s", self.node.id, warning)
            self._on_begun(request)
        self.begun.set()
        with self._changed:
            self._calls += 1
            self._sent = self._calm = self._asked = 0
        number = self._calls
        self._call = call = self.stub.Record(self._outgoing(number), wait_for_ready=False)
        if self._closing.is_set():
            call.cancel()
        if not call.add_callback(lambda: self._ended(number)):
            self._ended(number)
        try:
            # gRPC wakes ten times a second while it waits for a reply: let it wait for few.
            heard = 0
            while True:
                self._await_reply(number, heard)
                reply = next(call, None)
                if reply is None:
                    return self._finished(call)
                heard += 1
                self._answered(reply)
        finally:
            with self._changed:
                self._calls += 1  # ends `_outgoing`
                self._changed.notify_all()

    def _await_reply(self, number: int, heard: int) -> None:
        """Wait until there is a reply to read, or the call's end."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked > heard or self._over == number)

    def _ended(self, number: int) -> None:
        with self._changed:
            self._over = number
            self._changed.notify_all()

    def _finished(self, call: Any) -> bool:
        """The call has ended; whether it did because all records were sent, and the node took them."""
        with self._changed:
            done = self._finishing and self._sent == len(self._parts) and call.code() is grpc.StatusCode.OK
            if done:
                self._parts.clear()
                self._sent = 0
                self._changed.notify_all()
            return done

    def _outgoing(self, number: int) -> Iterator[pb.RecordPart]:
        """The records of one connection: first those that an earlier one has left unanswered."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._sent < len(self._parts)
                        or self._finishing
                        or self._calls != number
                        or self._closing.is_set()
                    )
                )
                all_sent = self._sent == len(self._parts)
                if self._calls != number or self._closing.is_set() or (self._finishing and all_sent):
                    return
                part = self._parts[self._sent]
                self._sent += 1
                self._calm += 1
                if self._calm <= ATTENTIVE or self._calm % ANSWERED_EVERY == 0:
                    part = _asking(part)
                    self._asked += 1
                    self._changed.notify_all()
            yield part

    def _answered(self, reply: pb.RecordReply) -> None:
        if self._complaint:
            _log.info("shadow node %d is back", self.node.id)
            self._complaint = ""
        with self._changed:
            while self._parts and self._parts[0].iteration <= reply.iteration:
                self._parts.popleft()
                self._sent = max(self._sent - 1, 0)
            if reply.wanted:
                self._calm = 0
            self._changed.notify_all()
        self._on_reply(self.node.id, reply)

    def _drop_oldest(self) -> None:
        self._parts.popleft()
        self._sent = max(self._sent - 1, 0)
        if not self._dropped:
            self._dropped = True
            _log.warning(
                "shadow node %d has left %d step records unanswered: from now on the oldest are dropped",
                self.node.id,
                QUEUED,
            )

    def _lost(self, why: str) -> None:
        if not self._complaint and not self._closing.is_set():
            _log.warning("shadow node %d (%s): %s; training goes on", self.node.id, self.node.mgmt, why)
        self._complaint = why


def _asking(part: pb.RecordPart) -> pb.RecordPart:
    """A copy that wants an answer: other lines send the same part."""
    asking = pb.RecordPart()
    asking.CopyFrom(part)
    asking.answer = True
    return asking


def reason(error: grpc.RpcError) -> str:
    """What went wrong in a call, in one line."""
    if isinstance(error, grpc.Call):
        detail = str(error.details() or "").partition("\n")[0]
        detail = detail.rpartition("Failed to connect to remote host: ")[
            2
        ]  # what gRPC says before is its own
        return f"{error.code().name}: {detail}" if detail else error.code().name
    return str(error)


class Stubs:
    """A job's shadow nodes as gRPC stubs, each with one channel."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._channels: dict[int, grpc.Channel] = {}

    def to(self, node: int) -> ShadowStub:
        """The stub of a node of that id."""
        with self._lock:
            if node not in self._channels:
                self._channels[node] = open_channel(self._job, node)
            return ShadowStub(self._channels[node])

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
