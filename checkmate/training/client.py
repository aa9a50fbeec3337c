"""A trainer's line to one shadow node: records go out in the background, whatever becomes of the node.

One thread a node. Records wait in a bounded queue until they are answered, so that a connection that broke
costs none; where a node is away for long, the oldest are dropped.
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

    def flush(self, timeout: float) -> bool:
        """Wait until every record is answered, as far as `timeout` seconds allow."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._parts, timeout)

    def close(self) -> None:
        """End the thread; what is still queued is lost."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            why = "it ended the connection"
            try:
                self._talk()
            except grpc.RpcError as error:
                why = reason(error)
            except grpc.FutureCancelledError:
                return  # closed
            pause = min(2 * pause, _LONGEST_PAUSE) if self._complaint else _FIRST_PAUSE
            self._lost(why)
            self._closing.wait(pause)

    def _talk(self) -> None:
        """One connection, to its end."""
        if self._begin is not None:
            request = self._begin()
            self._call = self.stub.Begin.future(request, timeout=BEGIN_SECONDS)
            for warning in self._call.result().warnings:
                _log.warning("shadow node %d: %s", self.node.id, warning)
            self._on_begun(request)
        self.begun.set()
        with self._changed:
            self._calls += 1
            self._sent = 0
        self._call = self.stub.Record(self._outgoing(self._calls), wait_for_ready=False)
        if self._closing.is_set():
            self._call.cancel()
        try:
            for reply in self._call:
                self._answered(reply)
        finally:
            with self._changed:
                self._calls += 1  # ends `_outgoing`
                self._changed.notify_all()

    def _outgoing(self, call: int) -> Iterator[pb.RecordPart]:
        """The records of one connection: first those that an earlier one has left unanswered."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._sent < len(self._parts) or self._calls != call or self._closing.is_set()
                )
                if self._calls != call or self._closing.is_set():
                    return
                part = self._parts[self._sent]
                self._sent += 1
            yield part

    def _answered(self, reply: pb.RecordReply) -> None:
        if self._complaint:
            _log.info("shadow node %d is back", self.node.id)
            self._complaint = ""
        with self._changed:
            while self._parts and self._parts[0].iteration <= reply.iteration:
                self._parts.popleft()
                self._sent = max(self._sent - 1, 0)
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
