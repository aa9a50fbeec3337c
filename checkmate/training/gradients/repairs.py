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
from checkmate.wire.repair import RepairRequest, SentStreams, Stream, digest_of

_log: Final = logging.getLogger("checkmate")

PIECE_BYTES: Final = 1 << 20
"""Bytes that are sent again with one tag."""
_ACKNOWLEDGED_SECONDS: Final = 5.0
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
        self._ending = False
        self._threads = [threading.Thread(target=self._discard, name="repairs discarded", daemon=True)]
        if nbytes:
            self._threads.append(threading.Thread(target=self._send_forever, name="repairs", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def oldest(self) -> int | None:
        """The oldest iteration that this rank can send again; `None` if it tags nothing."""
        with self._changed:
            return self._sent.oldest

    def keep(self, channel: int, shadow_id: int, data: memoryview) -> None:
        """Keep tagged bytes that are sent now. Called by the threads of channels."""
        with self._changed:
            self._sent.add((channel, shadow_id - self._first_id), data)

    def ask(self, node: int, missing: pb.MissingRange, answer: Answer) -> None:
        """Send again what a node asks for, without blocking; `answer` is called after that.

        A later request of the same node for the same stream replaces it.
        """
        stream = (missing.channel, missing.shard)
        request = RepairRequest(missing.start, missing.missing, missing.stop)
        with self._changed:
            if stream not in self._sent or not request.is_sound:
                _log.warning("shadow node %d asks for bytes that this rank has not sent: %s", node, request)
                return
            self._requests[node, stream] = (request, answer)
            self._changed.notify_all()

    def close(self, patience: float) -> None:
        """End. The rank before may need its repairs for up to `patience` seconds longer than this one."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads[1:]:
            thread.join()
        tcp.end_sending(self._ring.senders[0].socket)
        self._threads[0].join(patience)
        self._ring.abort()
        self._threads[0].join()

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
                self._changed.wait_for(lambda: self._requests or self._ending)
                if self._ending:
                    return
                (node, stream) = next(iter(self._requests))
                request, answer = self._requests.pop((node, stream))
                # A copy, because the memory is used again for later iterations.
                data = self._sent.read(stream, request.start, request.stop)
            if data is None:  # the node learns from step records that it is too old
                _log.debug("shadow node %d asks for %s, which is not kept any more", node, request)
                continue
            try:
                self._send(stream, request, data)
            except (OSError, TaggerError) as error:
                _log.warning("lost copies can't be sent again: %s", error)
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
