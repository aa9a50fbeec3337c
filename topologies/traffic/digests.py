"""SHA-256 of what a rank tags.

The digests are of the bytes as they were given to the tagged sockets, in that order; nothing of the shadow
side's arithmetic goes into them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0)]


class StrictModel(BaseModel):
    """Refuses what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tail(StrictModel):
    """From where on each stream is digested once more: so many bytes behind the beginning of an iteration."""

    iteration: Whole
    offset: Whole = 0


class TailResult(StrictModel):
    """A stream's bytes from `base` on."""

    base: int
    bytes: int
    sha256: str


class TaggedStream(StrictModel):
    """What went into one stream: its bytes and their SHA-256."""

    boundary: int
    side: int
    channel: int
    shadow_id: int
    bytes: int
    sha256: str
    tails: tuple[TailResult, ...] = ()


class _Digest:
    """SHA-256 of a stream's bytes from `base` on."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.bytes = 0
        self._hash = hashlib.sha256()

    def update(self, at: int, view: memoryview) -> None:
        """Take the stream's bytes from `at` on, as far as they are not before `base`."""
        tail = view[max(0, self.base - at) :]
        self.bytes += len(tail)
        self._hash.update(tail)

    def result(self) -> TailResult:
        return TailResult(base=self.base, bytes=self.bytes, sha256=self._hash.hexdigest())


class Digests:
    """Of each stream, and of its tails; takes views while the ring runs, and hashes them afterwards."""

    def __init__(self, boundary: int, side: int, hashing: bool, tails: Sequence[Tail] = ()) -> None:
        self._boundary, self._side = boundary, side
        self._hashing = hashing
        self._tails = tails
        self._seen: dict[tuple[int, int], list[memoryview]] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._digests: dict[tuple[int, int], list[_Digest]] = {}

    def expect(self, channel: int, shadow_id: int) -> None:
        """Name a stream beforehand: an empty one is reported too, and threads only find what exists."""
        self._seen[channel, shadow_id] = []
        self._bytes[channel, shadow_id] = 0
        self._digests[channel, shadow_id] = [_Digest(0)]

    def begin(self, iteration: int) -> None:
        """An iteration begins; what was taken before is hashed."""
        for tail in self._tails:
            if tail.iteration == iteration:
                for stream, digests in self._digests.items():
                    digests.append(_Digest(self._bytes[stream] + tail.offset))

    def take(self, channel: int, shadow_id: int, view: memoryview) -> None:
        """Note bytes that are tagged now; they must not change before `hash_taken`."""
        self._seen[channel, shadow_id].append(view)

    def hash_taken(self) -> None:
        """Hash what was taken since the last call."""
        for stream, views in self._seen.items():
            for view in views:
                if self._hashing:
                    for digest in self._digests[stream]:
                        digest.update(self._bytes[stream], view)
                self._bytes[stream] += len(view)
            views.clear()

    def results(self) -> list[TaggedStream]:
        """One result for each expected stream."""
        found = []
        for (channel, shadow_id), count in self._bytes.items():
            whole, *tails = (digest.result() for digest in self._digests[channel, shadow_id])
            found.append(
                TaggedStream(
                    boundary=self._boundary,
                    side=self._side,
                    channel=channel,
                    shadow_id=shadow_id,
                    bytes=count,
                    sha256=whole.sha256 if self._hashing else "",
                    tails=tuple(tails) if self._hashing else (),
                )
            )
        return found
