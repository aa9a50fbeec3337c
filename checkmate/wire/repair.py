"""Repair of streams of copies by a switch: what a rank can send again, and for how long. Pure.

A node that lacks bytes asks the rank that has sent them, in its replies to step records. The rank sends them
again with their tags, and tells a digest of what it has sent (design, section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

SENT_ITERATIONS: Final = 4
"""Iterations that a rank keeps of each stream, the one that is being sent among them."""
SENT_BYTES: Final = 64 << 20
"""It keeps more of them, up to this: as many bytes as a node's socket holds."""
SENT_ITERATIONS_MOST: Final = 1024
"""The most, because each takes memory beside its bytes."""
MAX_BYTES: Final = 16 << 20
"""The most that a node may ask for at a time."""
COMPARED_BYTES: Final = 64 << 10
"""Bytes before a hole whose digest is compared, too: they came at first, so that a rank's error shows."""
DIGEST_BYTES: Final = 16

Stream = tuple[int, int]
"""Channel and shard of a stream that a rank tags."""


def sent_iterations(nbytes: int) -> int:
    """Return how many iterations a rank keeps of a stream with that many bytes in each."""
    return max(SENT_ITERATIONS, min(SENT_BYTES // nbytes, SENT_ITERATIONS_MOST))


class RepairRequest(NamedTuple):
    """A node's request: bytes [missing, stop) of a stream again, and the digest of [start, stop)."""

    start: int
    missing: int
    stop: int

    @property
    def is_sound(self) -> bool:
        """Whether its numbers are in order, and it asks for no more than is permitted."""
        is_small = 0 < self.stop - self.start <= MAX_BYTES + COMPARED_BYTES
        return is_small and 0 <= self.start <= self.missing <= self.stop


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of repaired bytes. It shows an error of either side, not an attacker."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def within_iterations(start: int, stop: int, nbytes: int) -> Iterator[tuple[int, range]]:
    """Yield the iterations of bytes [start, stop) of a stream, each with the bytes within it.

    Iterations have `nbytes` each, and are counted from byte 0 on.
    """
    while start < stop:
        index, offset = divmod(start, nbytes)
        count = min(stop - start, nbytes - offset)
        yield index, range(offset, offset + count)
        start += count


@dataclass
class _Iteration:
    """The bytes of one iteration of a stream, the first `filled` of which are there."""

    data: memoryview
    filled: int = 0


@dataclass
class SentStream:
    """The last iterations of one stream, which has `nbytes` bytes in each. Byte 0 belongs to `first`."""

    nbytes: int
    first: int
    _iterations: deque[_Iteration] = field(default_factory=deque)
    _oldest: int = 0  # index of the oldest one, from the first iteration on
    _spare: list[memoryview] = field(default_factory=list)

    @property
    def oldest(self) -> int:
        """The oldest iteration that is there."""
        return self.first + self._oldest

    def add(self, data: memoryview) -> None:
        """Add the bytes that are sent next. What is too old is dropped."""
        while data:
            if not self._iterations or self._iterations[-1].filled == self.nbytes:
                self._begin()
            iteration = self._iterations[-1]
            count = min(len(data), self.nbytes - iteration.filled)
            iteration.data[iteration.filled : iteration.filled + count] = data[:count]
            iteration.filled += count
            data = data[count:]

    def read(self, start: int, stop: int) -> bytes | None:
        """Return a copy of bytes [start, stop) of the stream, or `None` if some are not there."""
        pieces = []
        for index, within in within_iterations(start, stop, self.nbytes):
            place = index - self._oldest
            if not 0 <= place < len(self._iterations) or within.stop > self._iterations[place].filled:
                return None
            pieces.append(self._iterations[place].data[within.start : within.stop])
        return b"".join(pieces)

    def _begin(self) -> None:
        iterations = self._iterations
        while len(iterations) >= sent_iterations(self.nbytes):
            self._spare.append(iterations.popleft().data)
            self._oldest += 1
        data = self._spare.pop() if self._spare else memoryview(bytearray(self.nbytes))
        iterations.append(_Iteration(data))
        self._spare.clear()


class SentStreams:
    """The last iterations of the streams that a rank tags. Not thread-safe."""

    def __init__(self, nbytes: Mapping[Stream, int], first: int) -> None:
        """Create it. `nbytes`: bytes of an iteration of each stream; `first`: the iteration at byte 0."""
        self._streams = {stream: SentStream(count, first) for stream, count in nbytes.items() if count}
        self.nbytes = 0
        """Bytes that were added."""

    @property
    def oldest(self) -> int | None:
        """The oldest iteration that all streams have; `None` if this rank tags nothing."""
        return max((stream.oldest for stream in self._streams.values()), default=None)

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._streams

    def add(self, stream: Stream, data: memoryview) -> None:
        """Add the bytes that a stream is sent next."""
        self._streams[stream].add(data)
        self.nbytes += len(data)

    def read(self, stream: Stream, start: int, stop: int) -> bytes | None:
        """Return a copy of bytes of a stream, or `None` if some are not there."""
        return self._streams[stream].read(start, stop)
