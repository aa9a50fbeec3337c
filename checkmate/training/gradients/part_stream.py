"""The trainer's end of a stream of parts: one shard's piece of this rank's part, to one shadow node.

A thread connects, sends each iteration that was put, and connects again after failures. An iteration stays
until the node's kernel has acknowledged it, and is sent again on a new connection, so that none is lost. For
a node that takes too little, whole iterations are left out: training does not wait, and memory is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from checkmate import state
from checkmate.base.wording import shortened
from checkmate.job.addresses import split_address
from checkmate.job.schema import ShadowNode
from checkmate.keys.macs import GRADIENTS, ConnectionProof, ConnectionSide, PartMacs, new_nonce
from checkmate.nodes.stubs import reason
from checkmate.training.gradients.part_route import PLAIN, Channel, Route
from checkmate.wire import copies, tcp
from checkmate.wire.copies import PartGreeting, PartHeader, PartsRefused

_log: Final = logging.getLogger("checkmate")

CONNECT_SECONDS: Final = 5.0
PATIENCE_SECONDS: Final = 3.0
"""Time for which it is not logged that a node takes nothing."""
_PAUSES: Final = (0.02, 0.2, 1.0)
"""Between attempts: the first, the longest until it is logged that they fail, and the longest after that."""
_WRITTEN_AT_ONCE: Final = 1 << 20
_POLL_SECONDS: Final = 0.0005
_BLOCKED_SECONDS: Final = 0.05
_IDLE_SECONDS: Final = 0.1
"""Time after which a connection that has nothing to send is looked at: the node may have closed it."""
_VANISHED_SECONDS: Final = 15


@dataclass(eq=False)
class _QueuedPart:
    """An iteration's bytes; none if it was left out, like those before it that were."""

    iteration: int
    data: torch.Tensor | None
    put_at: float
    await_data: Callable[[], object] | None = None
    """Waits until the data is there."""
    end: int = 0
    """Bytes written on the present connection once it was sent."""


class PartStream:
    """A stream to one node, until `close`.

    Its parts, which `room` returns and `put` queues, are host memory of `nbytes` each.
    """

    def __init__(
        self,
        node: ShadowNode,
        greeting: PartGreeting,
        key: bytes,
        *,
        pinned: bool = False,
        route: Route = PLAIN,
    ) -> None:
        """Create it; `start` connects.

        Args:
            node: The node.
            greeting: Its greeting, without nonce.
            key: The secret `gradients.key`.
            pinned: Whether memory of parts is pinned, for copies from a GPU.
            route: Its connections' way.
        """
        self.node = node
        self._route = route
        self.nbytes: Final = greeting.nbytes
        self._greeting, self._key, self._pinned = greeting, key, pinned
        self._condition = threading.Condition()
        self._parts: deque[_QueuedPart] = deque()
        self._free: list[torch.Tensor] = []
        self._sent = 0  # of `_parts`, on the present connection
        self._sending: _QueuedPart | None = None  # the one whose header may be on its way
        self._acknowledged = -1
        self._connected = False
        self._has_progressed = False  # since the last attempt to connect
        self._closing = False
        self.left_out = 0
        """Iterations that were left out because the node took too little."""
        self._failing_since = 0.0  # 0: it works
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name=f"parts to {node.id}", daemon=True)

    def start(self) -> None:
        """Connect, and send what is put."""
        self._thread.start()

    def room(self) -> torch.Tensor | None:
        """Return memory for the next iteration's bytes; `None` if the node is too far behind."""
        with self._condition:
            waiting = [queued for queued in self._parts if queued.data is not None]
            age = time.monotonic() - waiting[0].put_at if waiting else 0.0
            if copies.has_no_room(len(waiting), self.nbytes, age):
                return None
            if self._free:
                return self._free.pop()
        return torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def put(
        self, iteration: int, data: torch.Tensor | None, await_data: Callable[[], object] | None = None
    ) -> None:
        """Send an iteration's bytes, in memory of `room`; `None` leaves the iteration out.

        The thread that sends calls `await_data` before it reads them.
        """
        with self._condition:
            self.left_out += data is None
            last = self._parts[-1] if len(self._parts) > self._sent else None
            is_queued = last is not None and last is not self._sending
            if data is None and last is not None and is_queued and last.data is None:
                last.iteration = iteration
            else:
                self._parts.append(_QueuedPart(iteration, data, time.monotonic(), await_data))
            self._condition.notify_all()

    def has(self, iteration: int) -> bool:
        """Return whether the node's kernel has this iteration; also true if the node is away."""
        return self._acknowledged >= iteration or not self._connected

    def close(self) -> None:
        """End the thread. What was not sent is lost."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = _PAUSES[0]
        while not self._closing:
            try:
                with contextlib.closing(self._connect()) as channel:
                    self._send_from(channel, *self._greet(channel))
            except (OSError, PartsRefused) as error:
                self._complain(error)
            except Exception:  # noqa: BLE001 - such as CUDA's; nobody would know that the thread has ended
                _log.exception("gradients for shadow node %d can't be sent; training continues", self.node.id)
            finally:
                self._connected, self._sending = False, None
            with self._condition:
                progress, self._has_progressed = self._has_progressed, False
                pause = _PAUSES[0] if progress else min(2 * pause, _PAUSES[1 + self._has_complained])
                self._condition.wait_for(lambda: self._closing, pause)

    def _complain(self, error: Exception) -> None:
        """Log, once, why the node can't be reached for a while: just after a start, it may not be ready."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since < PATIENCE_SECONDS or self._has_complained or self._closing:
            return
        self._has_complained = True
        host, port = self.node.gradients_at
        text = "shadow node %d does not take this rank's gradients at %s:%d: %s; training continues"
        _log.warning(text, self.node.id, host, port, reason(error))

    def _connect(self) -> Channel:
        sock = tcp.connect(self.node.gradients_at, CONNECT_SECONDS, self._route.prepare)
        try:
            tcp.tune_for_bulk(sock)
            tcp.notice_vanished(sock, _VANISHED_SECONDS)
            return self._route.channel(sock, split_address(self.node.mgmt)[0])
        except BaseException:
            sock.close()
            raise

    def _greet(self, channel: Channel) -> tuple[int, PartMacs]:
        """Prove who we are. Return the iteration with which the node goes on, and our parts' MACs."""
        nonce = new_nonce()
        greeting = self._greeting._replace(nonce=nonce).pack()
        channel.write(memoryview(greeting))
        node_nonce = copies.unpack_challenge(channel.receive(copies.CHALLENGE_BYTES))
        proof = ConnectionProof(self._key, greeting, nonce, node_nonce, GRADIENTS)
        channel.write(memoryview(proof.mac(ConnectionSide.CONNECTS)))
        iteration, length, mac = copies.unpack_answer(channel.receive(copies.ANSWER_BYTES))
        text = channel.receive(length).decode("ascii", "replace")
        if not proof.is_authentic(ConnectionSide.ACCEPTS, mac):
            raise PartsRefused(
                "it has another gradients.key, or is not a shadow node of this job: give trainers and nodes "
                "the keys of one `checkmate keys`"
            )
        if text:
            raise PartsRefused(shortened(text))
        return iteration, PartMacs(proof)

    def _send_from(self, channel: Channel, first: int, macs: PartMacs) -> None:
        """Send iterations from `first` on, until the connection breaks or `close`."""
        sock = channel.sock
        sock.setblocking(False)
        with self._condition:
            while self._parts and self._parts[0].iteration < first:  # the node has them
                self._drop_first()
            self._sent = 0
            self._acknowledged = max(self._acknowledged, first - 1)
            self._connected = True
            self._failing_since, self._has_complained = 0.0, False
        while not self._closing:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._closing or self._sent < len(self._parts),
                    _POLL_SECONDS if self._sent else _IDLE_SECONDS,
                )
                queued = self._parts[self._sent] if self._sent < len(self._parts) else None
                self._sending = queued
            if queued is not None:
                self._send(channel, queued, macs)
            if self._sent:
                self._look_back(channel)
            elif has_hung_up(sock):
                raise ConnectionResetError("it closed the connection")

    def _send(self, channel: Channel, queued: _QueuedPart, macs: PartMacs) -> None:
        """Write an iteration: its header, its bytes if it has any, and their MAC."""
        if queued.await_data is not None:
            queued.await_data()
        nbytes = 0 if queued.data is None else self.nbytes
        header = PartHeader(queued.iteration, nbytes, time.monotonic() - queued.put_at).pack()
        mac = macs.begin(header)
        self._write(channel, memoryview(header))
        data = memoryview(b"") if queued.data is None else state.bytes_of(queued.data)
        for start in range(0, nbytes, _WRITTEN_AT_ONCE):
            piece = data[start : start + _WRITTEN_AT_ONCE]
            mac.update(piece)
            self._write(channel, piece)
        self._write(channel, memoryview(mac.end()))
        with self._condition:
            queued.end = channel.end
            self._sent += 1

    def _write(self, channel: Channel, data: memoryview) -> None:
        """Write all of it, unless the stream is closed meanwhile."""
        while data and not self._closing:
            count = channel.write(data)
            if not count:
                select.select([], [channel.sock], [], _BLOCKED_SECONDS)
            data = data[count:]

    def _look_back(self, channel: Channel) -> None:
        """Forget what the node's kernel has acknowledged. Raise `OSError` if the connection broke."""
        channel.flush()
        if unacknowledged := tcp.unacknowledged(channel.sock):
            tcp.check_alive(channel.sock)
        with self._condition:
            while self._sent and self._parts[0].end <= channel.written - unacknowledged:
                self._acknowledged = self._parts[0].iteration
                self._has_progressed = True
                self._drop_first()
                self._sent -= 1

    def _drop_first(self) -> None:
        data = self._parts.popleft().data
        if data is not None and len(self._free) < copies.KEPT_ITERATIONS:
            self._free.append(data)


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the other side sends no more, as after its end."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))
