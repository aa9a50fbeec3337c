"""A TCP socket whose chunks can be tagged.

A range is in the kernel before its first byte is written, and stays until its last byte is acknowledged, so
that every transmission of a byte, first or repeated, gets its tag.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from checkmate.tagger.errors import TaggerError
from checkmate.tagger.program import RANGES, SocketState, Tagger
from checkmate.wire import tag, tcp

CHUNK_MAX = (1 << 31) - 1
"""Maximum size of a chunk: half of the sequence space, so that a segment is never in two ranges."""

RETIRE_AFTER = 1 << 30
"""A range is removed from the kernel before this many bytes follow it."""

_REAPED_FROM = 16
"""The number of ranges from which on acknowledged ones are dropped: asking the kernel takes time."""

LOT_CHUNKS, LOT_BYTES = 64, 1 << 28
"""Planned chunks whose ranges are passed to the kernel at once, at most: each time costs 30 us or more."""

Chunk = tuple[int, int | None]
"""The length of a chunk, and its shadow id if it is tagged."""

_POLL_SECONDS = 0.0001


class TaggedSocket:
    """Sends chunks on an IPv4 TCP socket, from one thread at a time.

    It counts, for each shadow id, the tagged bytes of this incarnation: the position in its stream.
    """

    def __init__(
        self,
        tagger: Tagger,
        sock: socket.socket,
        channel: int,
        incarnation: int,
        dscp_bit: int = tag.DEFAULT_DSCP_BIT,
    ) -> None:
        """Prepare a socket that is not connected yet."""
        if sock.family != socket.AF_INET or sock.type != socket.SOCK_STREAM:
            raise TaggerError("only IPv4 TCP sockets can be tagged")
        self.socket = sock
        self.written_bytes = 0
        self._tagger = tagger
        self._channel = channel
        self._incarnation = incarnation
        self._positions: dict[int, int] = {}  # in the streams, after the last chunk begun
        self._announced_positions: dict[int, int] = {}  # ... and after the last one that the kernel knows
        self._announced = 0  # end of the chunks that the kernel knows, in bytes written
        self._planned: deque[Chunk] = deque()
        self._acknowledged: dict[int, int] = {}
        # For each live range: its end in bytes written, shadow id, and its end in the stream.
        self._ends: deque[tuple[int, int, int]] = deque()
        self._kernel_oldest: int | None = None  # end of the oldest range that the kernel still knows
        self._chunk_left = 0
        bit = dscp_bit << 2
        plain = sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) & ~bit
        self._state = SocketState(plain_tos=plain, tagged_tos=plain | bit)
        tagger.store(sock, self._state)

    def send_chunk(self, buffer: memoryview | bytes | bytearray, shadow_id: int | None = None) -> None:
        """Send a whole chunk, tagged if a shadow id is given. Block like `sendall`."""
        with memoryview(buffer).cast("B") as view:
            self.begin_chunk(len(view), shadow_id)
            self.write(view)

    def plan(self, chunks: Iterable[Chunk]) -> None:
        """Note the chunks that follow, so that the ranges of several are passed to the kernel at once."""
        self._planned += chunks

    def begin_chunk(self, length: int, shadow_id: int | None = None) -> None:
        """Begin a chunk of `length` bytes, which `write` sends in pieces; announce it if it was not yet."""
        if self._chunk_left:
            raise TaggerError(f"the previous chunk still lacks {self._chunk_left} bytes")
        if length > CHUNK_MAX:
            raise TaggerError(f"a chunk of {length} bytes exceeds the maximum of {CHUNK_MAX}")
        if self._planned and (planned := self._planned.popleft()) != (length, shadow_id):
            raise TaggerError(f"{(length, shadow_id)} is not the planned chunk {planned}")
        if not length:
            return
        if self.written_bytes >= self._announced:
            self._announce([(length, shadow_id), *self._planned_lot(length)])
        if shadow_id is not None:
            self._positions[shadow_id] = self._positions.get(shadow_id, 0) + length
        self._chunk_left = length

    def write(self, piece: memoryview | bytes) -> None:
        """Send the chunk's next bytes. The end of the chunk is also the end of a segment."""
        flags = self._flags(len(piece))
        self._chunk_left -= len(piece)
        self.socket.sendall(piece, flags)
        self.written_bytes += len(piece)

    def write_now(self, piece: memoryview | bytes) -> int:
        """Send as many of the chunk's next bytes as the kernel takes at once, and return their number."""
        # The kernel notes the end only once it has taken all.
        count = send_now(self.socket, piece, self._flags(len(piece)))
        self._chunk_left -= count
        self.written_bytes += count
        return count

    def _flags(self, length: int) -> int:
        """Return the flags to send a chunk's next bytes with. Raise `TaggerError` for more than are left."""
        if length > self._chunk_left:
            raise TaggerError(f"{length} bytes exceed the {self._chunk_left} bytes left of the chunk")
        # The kernel does not append to a buffer after MSG_EOR, so no segment is in two chunks.
        return 0 if length < self._chunk_left else socket.MSG_EOR

    def send_again(self, data: memoryview | bytes, channel: int, shadow_id: int, position: int) -> None:
        """Send bytes that another connection has sent, tagged with their position in that stream (64 bits).

        Such a socket has no stream of its own: it sends nothing else that is tagged.
        """
        length = len(data)
        end = self.written_bytes + length
        self._make_room(end, 1)
        self._add_range(self.written_bytes, length, channel, shadow_id, position)
        self._store()
        self._announced, self._chunk_left = end, length
        self.write(data)

    def position(self, shadow_id: int) -> int:
        """Return the number of tagged bytes of this stream, including the chunk that was begun."""
        return self._positions.get(shadow_id, 0)

    def acknowledged(self, shadow_id: int) -> int:
        """Return the acknowledged bytes of this stream, in whole chunks. Callable from any thread."""
        live = tuple(self._ends)  # first, because ranges reaped before are in `_acknowledged`
        before = self._acknowledged.get(shadow_id, 0)
        offset = self.written_bytes - self.unacknowledged()
        return max([before, *(stop for end, stream, stop in live if stream == shadow_id and end <= offset)])

    def unacknowledged(self) -> int:
        """Return the number of written bytes that the peer has not acknowledged (SIOCOUTQ)."""
        return tcp.unacknowledged(self.socket)

    def _planned_lot(self, before: int) -> Iterator[Chunk]:
        """Yield the planned chunks that are announced with the next one, of `before` bytes."""
        for chunk in itertools.islice(self._planned, LOT_CHUNKS - 1):
            before += chunk[0]
            if before > LOT_BYTES:
                return
            yield chunk

    def _announce(self, chunks: Sequence[Chunk]) -> None:
        """Pass the ranges of chunks to the kernel; all chunks announced before are written."""
        end = self.written_bytes + sum(length for length, _ in chunks)
        tagged = sum(shadow_id is not None for _, shadow_id in chunks)
        self._make_room(end, tagged)
        if tagged:
            start = self.written_bytes
            for length, shadow_id in chunks:
                if shadow_id is not None:
                    position = self._announced_positions.get(shadow_id, 0)
                    self._add_range(start, length, self._channel, shadow_id, position)
                start += length
            self._store()
        self._announced = end

    def _make_room(self, end: int, tagged: int) -> None:
        """Wait until the kernel has room for that many ranges more, of bytes written up to `end`."""
        expired = end - RETIRE_AFTER
        if self._kernel_oldest is not None and self._kernel_oldest < expired:
            self._retire(expired)
        if tagged:
            self._check_established()
            if len(self._ends) + tagged > _REAPED_FROM:
                self._await_ranges(RANGES - tagged)

    def _check_established(self) -> None:
        """Learn the connection's first sequence number. Raise `TaggerError` if the kernel has not seen it."""
        state = self._state
        if not state.established:
            self._tagger.fetch(self.socket, state)
        if not state.established:
            raise TaggerError(
                "the tagger has not seen this connection: the socket must be created in the tagger's cgroup, "
                "passed to TaggedSocket before it connects, and be connected"
            )

    def _add_range(self, start: int, length: int, channel: int, shadow_id: int, position: int) -> None:
        """Add the range of a chunk that begins after `start` bytes written, at `position` of its stream."""
        state = self._state
        state.set_range(
            state.tail,
            (state.first_sequence + start) % tag.MODULUS,
            length,
            position % tag.MODULUS,
            shadow_id,
            channel,
            self._incarnation,
        )
        state.tail = (state.tail + 1) % tag.MODULUS
        self._ends.append((start + length, shadow_id, position + length))
        self._announced_positions[shadow_id] = position + length

    def _retire(self, before: int) -> None:
        """Remove ranges that end before a byte: they would match again when sequence numbers wrap."""
        while self._ends and self._ends[0][0] < before:
            self._await_ranges(len(self._ends) - 1)
        self._store()

    def _store(self) -> None:
        """Pass the ranges that are live to the kernel."""
        self._tagger.store(self.socket, self._state)
        self._kernel_oldest = self._ends[0][0] if self._ends else None

    def _await_ranges(self, most: int) -> None:
        """Wait until at most `most` ranges are unacknowledged."""
        while True:
            self._reap()
            if len(self._ends) <= most:
                return
            tcp.check_alive(self.socket)
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> None:
        """Drop the ranges whose last byte is acknowledged. The next `store` updates the kernel."""
        acknowledged = self.written_bytes - self.unacknowledged()
        while self._ends and self._ends[0][0] <= acknowledged:
            _, shadow_id, stop = self._ends[0]
            self._acknowledged[shadow_id] = stop
            self._ends.popleft()
            self._state.head = (self._state.head + 1) % tag.MODULUS


def send_now(sock: socket.socket, piece: memoryview | bytes, flags: int = 0) -> int:
    """Send as many bytes as the kernel takes at once, and return their number, which may be 0."""
    try:
        return sock.send(piece, flags | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
