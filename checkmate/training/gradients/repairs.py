"""A rank's side of repair: what its streams were sent, and a connection on which it sends parts of it again.

In a job whose copies may be lost, each rank has one more connection to the next one. A rank that tags keeps
its last iterations, and sends again what shadow nodes ask for, with its tags, so that the switch copies it
as it did at first. The next rank discards it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from checkmate.ring.connections import Ring
from checkmate.rpc import shadow_pb2 as pb
from checkmate.tagger import TaggedSocket
from checkmate.tagger.errors import TaggerError
from checkmate.wire import tcp
from checkmate.wire.repair import MAX_BYTES, RepairRequest, SentStreams, Stream, digest_of

_log: Final = logging.getLogger("checkmate")

PIECE_BYTES: Final = 1 << 20
"""Bytes that are sent again with one tag."""
SENT_AGAIN_MOST: Final = 4
"""A node may ask for this many times what this rank has sent to all."""
UNACKNOWLEDGED_SECONDS: Final = 5
"""The connection ends if the next rank's kernel takes nothing for this time."""
_ACKNOWLEDGED_SECONDS: Final = 2.0
"""Within which the next rank's kernel takes what is sent to it again."""
_DISCARDED_AT_ONCE: Final = 1 << 18

Answer = Callable[[pb.RepairedRange], None]
"""Tells a node what was sent again."""


class Repairs:
    """The repairs of a rank. Its creator closes `ring`, which has one channel."""

    def __init__(self, ring: Ring, nbytes: Mapping[Stream, int], first_iteration: int, first_id: int) -> None:
        """Begin.

        Args:
            ring: The connections for repairs.
            nbytes: Bytes of an iteration of each stream that this rank tags.
            first_iteration: The iteration at byte 0 of the streams.
            first_id: Shard 0's in tags.
        """
        self._ring, self._first_id = ring, first_id
        self._sent = SentStreams(nbytes, first_iteration)
        self._requests: dict[tuple[int, Stream], tuple[RepairRequest, Answer]] = {}
        self._changed = threading.Condition()
        self._ending = self._is_broken = False
        self._sending: tuple[int, Stream, int, int] | None = None
        self._sent_again: dict[int, int] = {}  # bytes, by node
        self._complained: set[int] = set()  # nodes of which it is logged that they ask for too much
        # No duplicate may be on its way for as long as a stream takes for 4 GB: its number would fit again.
        tcp.end_unacknowledged(ring.senders[0].socket, UNACKNOWLEDGED_SECONDS)
        self._threads = [threading.Thread(target=self._discard, name="repairs discarded", daemon=True)]
        if nbytes:
            self._threads.append(threading.Thread(target=self._send_forever, name="repairs", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def oldest(self) -> int | None:
        """The oldest iteration that this rank can send again; `None` if it can't send any."""
        with self._changed:
            return None if self._is_broken else self._sent.oldest

    def keep(self, channel: int, shadow_id: int, data: memoryview) -> None:
        """Keep tagged bytes that are sent now. Called by the threads of channels."""
        with self._changed:
            self._sent.add((channel, shadow_id - self._first_id), data)

    def ask(self, node: int, missing: pb.MissingRange, answer: Answer) -> None:
        """Send again what a node asks for, without blocking; `answer` is called after that.

        A later request of the same node for the same stream replaces it, unless it is being sent.
        """
        stream = (missing.channel, missing.shard)
        request = RepairRequest(missing.start, missing.missing, missing.stop)
        with self._changed:
            is_foreign = stream not in self._sent or not request.is_sound
            if is_foreign or self._sent_again.get(node, 0) > SENT_AGAIN_MOST * self._sent.nbytes + MAX_BYTES:
                if node not in self._complained:
                    self._complained.add(node)
                    words = (
                        "bytes that this rank has not sent" if is_foreign else "more than it can have lost"
                    )
                    _log.warning("shadow node %d asks for %s: %s is not sent again", node, words, request)
                return
            if self._sending != (node, stream, request.start, request.stop):
                self._requests[node, stream] = (request, answer)
                self._changed.notify_all()

    def linger(self, seconds: float) -> None:
        """End to send, and wait until the rank before has, which may need longer."""
        self._end(seconds)
        self._threads[0].join(seconds)

    def close(self) -> None:
        """End at once."""
        self._end(0.0)
        self._ring.abort()
        for thread in self._threads:
            thread.join()

    def _end(self, seconds: float) -> None:
        """End to send, within a time: the next rank may not take anything any more."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads[1:]:
            thread.join(seconds)
        tcp.end_sending(self._ring.senders[0].socket)

    def _discard(self) -> None:
        """Read what the rank before sends again, for the switch alone, until it ends."""
        receiver, memory = self._ring.receivers[0], bytearray(_DISCARDED_AT_ONCE)
        try:
            while receiver.recv_into(memory):
                pass
        except OSError as error:  # that rank has died, which its other connections show
            _log.debug("repairs of the rank before: %s", error)

    def _send_forever(self) -> None:
        while True:
            with self._changed:
                self._sending = None
                self._changed.wait_for(lambda: self._requests or self._ending)
                if self._ending:
                    return
                (node, stream) = next(iter(self._requests))
                request, answer = self._requests.pop((node, stream))
                self._sending = (node, stream, request.start, request.stop)
                self._sent_again[node] = self._sent_again.get(node, 0) + request.stop - request.missing
                # A copy, because the memory is used again for later iterations.
                data = self._sent.read(stream, request.start, request.stop)
            if data is None:  # the node learns from step records that it is too old
                _log.debug("shadow node %d asks for %s, which is not there any more", node, request)
                continue
            try:
                self._send(stream, request, data)
            except TimeoutError:  # the node asks again
                _log.debug("the next rank has not taken what was sent again")
                continue
            except (OSError, TaggerError) as error:
                with self._changed:
                    self._is_broken = True
                    is_expected = self._ending
                if not is_expected:
                    _log.warning("lost copies can't be sent again from now on: %s", error)
                return
            answer(
                pb.RepairedRange(
                    channel=stream[0],
                    shard=stream[1],
                    start=request.start,
                    stop=request.stop,
                    digest=digest_of(data),
                )
            )

    def _send(self, stream: Stream, request: RepairRequest, data: bytes) -> None:
        sender = self._ring.senders[0]
        assert isinstance(sender, TaggedSocket)
        channel, shard = stream
        view = memoryview(data)
        for position in range(request.missing, request.stop, PIECE_BYTES):
            piece = view[position - request.start :][: min(PIECE_BYTES, request.stop - position)]
            sender.send_again(piece, channel, self._first_id + shard, position)
        # Then the switch has copied it, and a digest that arrives is not ahead of its bytes for long.
        tcp.drain(sender.socket, _ACKNOWLEDGED_SECONDS)
