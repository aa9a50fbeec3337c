"""A TCP socket whose chunks may be tagged.

A range is in the kernel before its first byte is written, and stays until its last is acknowledged: so
every transmission of a byte, first or repeated, finds its tag.
"""

from __future__ import annotations

import socket
import time
from collections import deque

from checkmate.tagger.errors import TaggerError
from checkmate.tagger.program import Tagger
from checkmate.tagger.state import RANGES, SocketState
from checkmate.wire import tag, tcp

CHUNK_MAX = (1 << 31) - 1
"""Bytes in a chunk: half of the sequence space, so that a segment is never in two ranges."""

_POLL_SECONDS = 0.0001


RETIRE_AFTER = 1 << 30
"""Untagged bytes behind the last tagged one, after which the kernel is told that no range is left."""


class TaggedSocket:
    """Sends chunks on an IPv4 TCP socket that isn't connected yet; one thread at a time.

    Counts, for each shadow id, the tagged bytes of this incarnation: the position in its stream.
    Connect it by its own `connect`, or the socket's.
    """

    def __init__(
        self,
        tagger: Tagger,
        sock: socket.socket,
        channel: int,
        incarnation: int,
        dscp_bit: int = tag.DEFAULT_DSCP_BIT,
    ) -> None:
        if sock.family != socket.AF_INET or sock.type != socket.SOCK_STREAM:
            raise TaggerError("only IPv4 TCP sockets can be tagged")
        self.socket = sock
        self.written = 0
        self._tagger = tagger
        self._channel = channel
        self._incarnation = incarnation
        self._positions: dict[int, int] = {}
        self._acknowledged: dict[int, int] = {}
        # Of the live ranges: end in bytes written, shadow id, end in its stream.
        self._ends: deque[tuple[int, int, int]] = deque()
        self._kernel_end: int | None = None  # of the newest range that the kernel still knows
        self._chunk_left = 0
        bit = dscp_bit << 2
        plain = sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) & ~bit
        self._state = SocketState(plain_tos=plain, tagged_tos=plain | bit)
        tagger.store(sock, self._state)

    def connect(self, address: tuple[str, int]) -> None:
        """Connect the socket."""
        self.socket.connect(address)

    def send_chunk(self, buffer: memoryview | bytes | bytearray, shadow_id: int | None = None) -> None:
        """Send a whole chunk, tagged where a shadow id is given. Blocks as `sendall` does."""
        with memoryview(buffer).cast("B") as view:
            self.begin_chunk(len(view), shadow_id)
            self.write(view)

    def begin_chunk(self, length: int, shadow_id: int | None = None) -> None:
        """Announce a chunk of `length` bytes, which `write` then gets piece by piece."""
        if self._chunk_left:
            raise TaggerError(f"the chunk before still lacks {self._chunk_left} bytes")
        if length > CHUNK_MAX:
            raise TaggerError(f"a chunk of {length} bytes; {CHUNK_MAX} at most")
        if not length:
            return
        if shadow_id is not None:
            self._add_range(length, shadow_id)
        elif self._kernel_end is not None and self.written + length - self._kernel_end > RETIRE_AFTER:
            self._retire()
        self._chunk_left = length

    def write(self, piece: memoryview | bytes) -> None:
        """Send the chunk's next bytes; those that end it also end a segment."""
        length = len(piece)
        if length > self._chunk_left:
            raise TaggerError(f"{length} bytes, where the chunk lacks {self._chunk_left}")
        self._chunk_left -= length
        # The kernel merges nothing into a buffer behind MSG_EOR, so no segment straddles two chunks.
        self.socket.sendall(piece, 0 if self._chunk_left else socket.MSG_EOR)
        self.written += length

    def position(self, shadow_id: int) -> int:
        """How many bytes of this stream were tagged so far, the announced chunk included; 64 bits."""
        return self._positions.get(shadow_id, 0)

    def acknowledged(self, shadow_id: int) -> int:
        """How many bytes of this stream the peer has acknowledged, in whole chunks; from any thread."""
        live = tuple(self._ends)  # first: what is reaped from now on has been noted below
        known = self._acknowledged.get(shadow_id, 0)
        done = self.written - self.unacknowledged()
        return max([known, *(stop for end, stream, stop in live if stream == shadow_id and end <= done)])

    def unacknowledged(self) -> int:
        """How many of the written bytes the peer has not acknowledged (SIOCOUTQ)."""
        return tcp.unacknowledged(self.socket)

    def drain(self, timeout: float) -> None:
        """Wait until all is acknowledged; `TimeoutError` after `timeout` seconds."""
        tcp.drain(self.socket, timeout)

    def close(self) -> None:
        """Close the socket. Undrained bytes are still sent, tagged while the tagger is attached."""
        self.socket.close()

    def _add_range(self, length: int, shadow_id: int) -> None:
        state = self._state
        if not state.established:
            self._learn_first_sequence()
        self._await_ranges(RANGES - 1)
        position = self._positions.get(shadow_id, 0)
        entry = state.ranges[state.tail % RANGES]
        entry.anchor = (state.first_sequence + self.written) % tag.MODULUS
        entry.length = length
        entry.sequence = position % tag.MODULUS
        entry.shadow_id = shadow_id
        entry.channel = self._channel
        entry.incarnation = self._incarnation
        state.tail = (state.tail + 1) % tag.MODULUS
        self._tagger.store(self.socket, state)
        self._ends.append((self.written + length, shadow_id, position + length))
        self._kernel_end = self.written + length
        self._positions[shadow_id] = position + length

    def _retire(self) -> None:
        """Take all ranges from the kernel: an old one would match again once sequence numbers wrap."""
        self._await_ranges(0)
        self._tagger.store(self.socket, self._state)
        self._kernel_end = None

    def _await_ranges(self, most: int) -> None:
        """Wait until at most so many ranges are not acknowledged."""
        while True:
            self._reap()
            if len(self._ends) <= most:
                return
            tcp.check_alive(self.socket)
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> None:
        """Let go of the ranges whose last byte is acknowledged; the kernel learns it with the next range."""
        acknowledged = self.written - self.unacknowledged()
        while self._ends and self._ends[0][0] <= acknowledged:
            _, shadow_id, stop = self._ends[0]
            self._acknowledged[shadow_id] = stop
            self._ends.popleft()
            self._state.head = (self._state.head + 1) % tag.MODULUS

    def _learn_first_sequence(self) -> None:
        self._tagger.fetch(self.socket, self._state)
        if not self._state.established:
            raise TaggerError(
                "the tagger has not seen this connection: the socket must be made in the tagger's cgroup, "
                "given to TaggedSocket before it connects, and be connected"
            )
