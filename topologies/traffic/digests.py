"""SHA-256 of the bytes that a rank tags.

The digests are of the bytes given to the tagged sockets, in that order. They are independent of the shadow
side's arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0)]


class StrictModel(BaseModel):
    """Base of models that reject unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tail(StrictModel):
    """Start of an additional digest of each stream: an iteration, and an offset in bytes."""

    iteration: Whole
    offset: Whole = 0


class TailResult(StrictModel):
    """Digest of a stream's bytes from `base` on."""

    base: int
    bytes: int
    sha256: str


class TaggedStream(StrictModel):
    """The number of tagged bytes of a stream, and their SHA-256."""

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
        """Add the stream's bytes at position `at`, without those before `base`."""
        tail = view[max(0, self.base - at) :]
        self.bytes += len(tail)
        self._hash.update(tail)

    def result(self) -> TailResult:
        return TailResult(base=self.base, bytes=self.bytes, sha256=self._hash.hexdigest())


class Digests:
    """Digests of each stream and its tails; it collects views while the ring runs, and hashes them later."""

    def __init__(self, boundary: int, side: int, hashing: bool, tails: Sequence[Tail] = ()) -> None:
        self._boundary, self._side = boundary, side
        self._hashing = hashing
        self._tails = tails
        self._seen: dict[tuple[int, int], list[memoryview]] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._digests: dict[tuple[int, int], list[_Digest]] = {}

    def expect(self, channel: int, shadow_id: int) -> None:
        """Add a stream beforehand, so that an empty one is reported and threads add no streams."""
        self._seen[channel, shadow_id] = []
        self._bytes[channel, shadow_id] = 0
        self._digests[channel, shadow_id] = [_Digest(0)]

    def begin(self, iteration: int) -> None:
        """Begin an iteration; hash the views taken before."""
        for tail in self._tails:
            if tail.iteration == iteration:
                for stream, digests in self._digests.items():
                    digests.append(_Digest(self._bytes[stream] + tail.offset))

    def take(self, channel: int, shadow_id: int, view: memoryview) -> None:
        """Take a view of bytes that are tagged now; they must not change before `hash_taken`."""
        self._seen[channel, shadow_id].append(view)

    def hash_taken(self) -> None:
        """Hash the views taken since the last call."""
        for stream, views in self._seen.items():
            for view in views:
                if self._hashing:
                    for digest in self._digests[stream]:
                        digest.update(self._bytes[stream], view)
                self._bytes[stream] += len(view)
            views.clear()

    def results(self) -> list[TaggedStream]:
        """Return one result for each expected stream."""
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
