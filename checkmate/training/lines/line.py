"""A trainer's connection to one shadow node: sends step records in the background and survives node failures.

There is one thread per node. Records stay in a bounded queue until the node has answered them, so that a
broken connection loses none; if a node is away for long, the oldest are dropped. Answers are requested rarely
while a node needs nothing. The node's socket holds records that it has not read (`rpc.frames`), even after
this process has died.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from checkmate.base.wording import shortened
from checkmate.events.kinds import TRAINER_NODE_BACK, TRAINER_NODE_LOST
from checkmate.events.process_log import say
from checkmate.job.schema import ShadowNode
from checkmate.nodes.stubs import reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import SUPERSEDED
from checkmate.rpc.frames import ANSWER, GREETING, FrameError, Unpacker, pack
from checkmate.rpc.protocol import ANSWER_BYTES, bounded, mismatch
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.training.lines.questions import Questions
from checkmate.wire import tcp

_log: Final = logging.getLogger("checkmate")

QUEUED_BYTES, QUEUED_RECORDS = 64 << 20, 4
"""Records that a node has not answered are dropped if there are more than this, of both."""
BEGIN_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 5.0
ANSWERED_EVERY: Final = 4
"""One record in this many requests an answer, and each that is large."""
_LARGE: Final = QUEUED_BYTES // (2 * ANSWERED_EVERY)
ATTENTIVE: Final = 16
"""After a connect, or after a request of the node, this many records in a row request an answer."""
_WARNINGS_MAX, _TEXT_MAX = 16, 1000
"""Limit of a node's text, because it is another host's."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 1.0
_AT_ONCE: Final = 1 << 20  # bytes taken from the queue before they are written
_VANISHED_SECONDS: Final = 15
_WAIT: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Queued(NamedTuple):
    iteration: int
    data: bytes


class OtherVersion(RuntimeError):
    """The node has another version of Checkmate."""


class OtherStart(RuntimeError):
    """Another start of training has superseded this one for good."""


class Line:
    """The connection to one shadow node, until `close`."""

    def __init__(
        self,
        node: ShadowNode,
        stub: ShadowStub,
        begin: Callable[[], pb.BeginRequest] | None,
        on_reply: Callable[[int, pb.RecordReply], None],
        on_begun: Callable[[pb.BeginRequest], None] = lambda request: None,
        *,
        tls: ssl.SSLContext | None = None,
        at_risk: Callable[[int], str] = lambda node: "",
        repairs: pb.RecordPart | None = None,
    ) -> None:
        """Create it; `start` connects.

        Args:
            node: The node's addresses.
            stub: A stub for the node.
            begin: Returns the group's first rank's request at each connect; `None` on other ranks.
            on_reply: Called with the node's id and each answer to a record.
            on_begun: Called with a request that the node has accepted, before it is sent records.
            tls: Use TLS with this context.
            at_risk: Returns in words what nobody else has if the node with this id is lost, or "".
            repairs: If the node may ask for copies again, the fields that all parts of this rank share.
        """
        self._questions = Questions(repairs)
        """For what the node lacks; with `_condition`."""
        self.node = node
        self.stub = stub
        self.begin_accepted = threading.Event()
        """Set once the node has accepted `begin`, or if there is none."""
        self.filled: dict[int, frozenset[int]] = {}
        """Parameters that the node takes from the state of former ranks by itself, by shard."""
        self._begin = begin
        self._on_reply = on_reply
        self._on_begun = on_begun
        self._tls = tls
        self._at_risk = at_risk
        self._parts: deque[_Queued] = deque()
        self._nbytes = 0  # of them
        self._count_sent = 0  # of them, on the present connection
        # The last iterations on the present connection: dequeued, and in the kernel.
        self._dequeued_iteration = self._kernel_iteration = -1
        self._calm = 0  # records since the node requested something
        self._finishing = self._flushed = False
        self._condition = threading.Condition()
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._dropped = False  # whether it was said since the queue was empty
        self._unsure = -1  # the last iteration whose record was sent and dropped, and not answered
        self._superseded = False
        self._warnings: set[str] = set()
        """Warnings that were logged: a node that comes and goes repeats them."""
        self._complaint = ""
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"shadow node {node.id}", daemon=True)

    def start(self) -> None:
        """Connect, and reconnect after failures."""
        self._thread.start()

    def send(self, iteration: int, data: bytes) -> None:
        """Queue an iteration's serialized part without blocking."""
        if self._closing.is_set():
            return
        with self._condition:
            self._parts.append(_Queued(iteration, data))
            self._nbytes += len(data)
            while self._nbytes > QUEUED_BYTES and len(self._parts) > QUEUED_RECORDS:
                self._drop_oldest()
        os.eventfd_write(self._wake, 1)

    def tell_repaired(self, repaired: pb.RepairedRange) -> None:
        """Tell the node at once what was sent again. If it does not hear of it, it asks again."""
        with self._condition:
            if self._closing.is_set():  # after which `_wake` may be another file's
                return
            self._questions.note_repaired(repaired)
            os.eventfd_write(self._wake, 1)

    def departed(self, iteration: int) -> bool:
        """Return whether an iteration's record was passed to the kernel; also true if the node is away."""
        return self._kernel_iteration >= iteration or not self.connected

    @property
    def connected(self) -> bool:
        """Whether the node answers."""
        return self.begin_accepted.is_set() and not self._complaint

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the node has every record. Return whether it has."""
        self._finishing = True
        os.eventfd_write(self._wake, 1)
        with self._condition:
            return self._condition.wait_for(lambda: not self._parts, timeout)

    def end(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """End the thread. Queued records are lost."""
        self.end()
        if self._thread.ident is not None:
            self._thread.join()
        with self._condition:
            os.close(self._wake)

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            try:
                if self._begin is not None:
                    self._send_begin(self._begin)
                self.begin_accepted.set()
                with closing(self._connect()) as sock:
                    why = self._exchange(sock)
            except OtherStart as error:
                why = reason(error)
                self._take(pb.RecordReply(iteration=-1, superseded=True))
            except grpc.RpcError as error:
                why = reason(error)
            except grpc.FutureCancelledError:
                return  # closed
            except (OSError, FrameError, DecodeError, OtherVersion) as error:
                why = reason(error)
            if not why:
                return
            if self._superseded:
                self._give_up(why)
                return
            pause = min(2 * pause, _LONGEST_PAUSE) if self._complaint else _FIRST_PAUSE
            if not self._complaint and not self._closing.is_set():
                number, place = self.node.id, self.node.mgmt
                event = TRAINER_NODE_LOST(node=number, why=why)
                text, risk = "shadow node %d (%s): %s; training continues%s", self._at_risk(number)
                say(logging.WARNING, event, text, number, place, why, risk)
            self._complaint = why
            self._closing.wait(pause)

    def _give_up(self, why: str) -> None:
        """Take no more records: the node follows another start, and would refuse this one for good."""
        self._complaint = why
        with self._condition:
            self._parts.clear()
            self._nbytes = 0
            self._closing.set()
            self._condition.notify_all()

    def _send_begin(self, begin: Callable[[], pb.BeginRequest]) -> None:
        request = begin()
        self._call = self.stub.Begin.future(request, timeout=BEGIN_SECONDS)
        if self._closing.is_set():
            self._call.cancel()
        try:
            reply = self._call.result()
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() == SUPERSEDED:
                raise OtherStart(reason(error)) from None
            raise
        if different := mismatch(reply.protocol, "the node", "this trainer"):
            raise OtherVersion(different)
        if wrong := bounded(reply):
            raise FrameError(f"its answer to `Begin` is not a shadow node's: {wrong}")
        self.filled = {filled.shard: frozenset(filled.parameters) for filled in reply.filled}
        for warning in (shortened(text, _TEXT_MAX) for text in reply.warnings[:_WARNINGS_MAX]):
            if warning not in self._warnings:
                self._warnings.add(warning)
                _log.warning("shadow node %d: %s", self.node.id, warning)
        self._on_begun(request)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self.node.records_at, CONNECT_SECONDS)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tcp.notice_vanished(sock, _VANISHED_SECONDS)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self.node.records_at[0])
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock

    def _exchange(self, sock: socket.socket) -> str:
        """Send records and read replies. Return why it ended; empty if all is sent or the line is closed."""
        outgoing, unpacker = bytearray(GREETING), Unpacker(greeted=True, most=ANSWER_BYTES)
        with self._condition:
            self._warn_unsure()
            self._count_sent = self._calm = 0
            self._questions.begin_again()
            self._dequeued_iteration = self._kernel_iteration = -1
            self._flushed = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while True:
                for data in self._next(_AT_ONCE - len(outgoing)):
                    outgoing += data
                _write(sock, outgoing)
                if not outgoing:
                    self._kernel_iteration = self._dequeued_iteration
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
                selector.modify(sock, events)
                timeout = None if outgoing else self._seconds_to_question()
                ready = {key.fd for key, _ in selector.select(timeout)}
                outgoing += self._question() if not outgoing else b""
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._closing.is_set() or (self._finishing and not self._parts):
                    return ""
                for frame in self._read(sock, unpacker) if sock.fileno() in ready else ():
                    reply = pb.RecordReply.FromString(frame)
                    if wrong := bounded(reply):
                        return f"its reply to a step record is not a shadow node's: {wrong}"
                    if reply.refused:
                        return shortened(reply.refused, _TEXT_MAX)
                    self._handle_answer(reply)

    def _read(self, sock: socket.socket, unpacker: Unpacker) -> Iterator[bytes]:
        """Yield the messages received. Raise `ConnectionResetError` if the node has closed the connection."""
        while not self._closing.is_set():  # a node may send for ever
            try:
                data = sock.recv(1 << 16)
            except _WAIT:
                return
            if not data:
                raise ConnectionResetError("it closed the connection")
            for frame in unpacker.feed(data):
                yield frame.data

    def _next(self, room: int) -> Iterator[bytes]:
        """Yield frames to send now, beginning with those that an earlier connection left unanswered."""
        with self._condition:
            while room > 0 and self._count_sent < len(self._parts):
                self._calm += 1
                record = self._parts[self._count_sent].data
                regular = self._calm <= ATTENTIVE or self._calm % ANSWERED_EVERY == 0
                data = pack(record, ANSWER if regular or len(record) >= _LARGE else 0)
                self._dequeued_iteration = self._parts[self._count_sent].iteration
                self._count_sent += 1
                self._questions.note_record(time.monotonic())
                room -= len(data)
                yield data
            if self._finishing and not self._flushed and self._count_sent == len(self._parts):
                self._flushed = True
                yield pack(b"", ANSWER)

    def _seconds_to_question(self) -> float | None:
        """Return the time until a question; `None` if something has to happen before."""
        with self._condition:
            seconds = self._questions.seconds_left(time.monotonic())
        return None if math.isinf(seconds) else seconds

    def _question(self) -> bytes:
        """Return the frame of a question, when it is time."""
        with self._condition:
            part = self._questions.ask(time.monotonic())
        return b"" if part is None else pack(part.SerializeToString(), ANSWER)

    def _handle_answer(self, reply: pb.RecordReply) -> None:
        if reply.iteration < 0 and not reply.superseded:
            with self._condition:
                self._questions.hear_answer(awaits_copies=reply.awaits_copies)
            self._take(reply)
            return  # a node answers a question also before it has begun this start
        if self._complaint:
            say(logging.INFO, TRAINER_NODE_BACK(node=self.node.id), "shadow node %d is back", self.node.id)
            self._complaint = ""
        with self._condition:
            while self._count_sent and self._parts and self._parts[0].iteration <= reply.iteration:
                self._pop()  # what was not sent is not answered, whatever the node says
            if reply.iteration >= self._unsure:
                self._unsure = -1
            self._dropped = self._dropped and bool(self._parts)
            if reply.wanted:
                self._calm = 0
            self._condition.notify_all()
        self._take(reply)

    def _take(self, reply: pb.RecordReply) -> None:
        self._superseded |= reply.superseded
        self._on_reply(self.node.id, reply)

    def _pop(self) -> None:
        self._nbytes -= len(self._parts.popleft().data)
        self._count_sent = max(self._count_sent - 1, 0)

    def _drop_oldest(self) -> None:
        iteration, was_sent = self._parts[0].iteration, self._count_sent > 0
        waiting, size = self._nbytes / 2**20, len(self._parts[0].data) / 2**20
        self._pop()
        if was_sent:  # it is with the node, unless the connection breaks
            self._unsure = iteration
        elif not self._dropped:
            self._dropped = True
            slow = (
                "takes step records too slowly",
                "See the node's log, and have extra() return less, or on one rank only "
                "(`checkmate docs training`)",
            )
            why, remedy = slow if self.connected else ("is away", "Start it again, or see its log")
            _log.warning(
                "shadow node %d %s: %.0f MiB wait (%.1f MiB each), and the oldest are dropped. "
                "Its shard is unavailable until it has been seeded again. %s",
                self.node.id,
                why,
                waiting,
                size,
                remedy,
            )

    def _warn_unsure(self) -> None:
        """Tell of records that were sent and dropped before a connection broke, so that none repeats them."""
        if self._unsure >= 0:
            _log.warning(
                "shadow node %d has not answered the records up to iteration %d, which were sent on a "
                "connection that broke, and too large to be kept (together over %d MiB). If it lacks one, "
                "its shard is unavailable until it is seeded again",
                self.node.id,
                self._unsure,
                QUEUED_BYTES >> 20,
            )
            self._unsure = -1


def _write(sock: socket.socket, outgoing: bytearray) -> None:
    """Send as much as the socket accepts now."""
    while outgoing:
        try:
            count = sock.send(outgoing)
        except _WAIT:
            return
        del outgoing[:count]
