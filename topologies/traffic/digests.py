"""SHA-256 of the bytes of streams: at the rank that tags them, and at the shadow node that reads them.

A rank's digests are of the bytes given to the tagged sockets, in that order. They are independent of the
shadow side's arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from topologies.describe.topology import BadDescription

ModelT = TypeVar("ModelT", bound=BaseModel)
Whole = Annotated[int, Field(ge=0)]


class StrictModel(BaseModel):
    """Base of models that reject unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_config(file: Path, model: type[ModelT]) -> ModelT:
    """Return the configuration in a file. Raise `BadDescription` with all its faults."""
    try:
        return model.model_validate_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadDescription(f"{file}: {error}") from None
    except ValidationError as error:
        paths = [".".join(str(part) for part in fault["loc"]) for fault in error.errors()]
        faults = zip(paths, error.errors(), strict=True)
        lines = (f"{file}: {path + ': ' if path else ''}{fault['msg']}" for path, fault in faults)
        raise BadDescription("\n".join(lines)) from None


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Tail:
    """Start of an additional digest of each stream: an iteration, and an offset in bytes."""

    iteration: Whole
    offset: Whole = 0


class TailResult(StrictModel):
    """Digest of a stream's bytes from `base` on."""

    base: int
    bytes: int
    sha256: str


class StreamResult(StrictModel):
    """The number of bytes of a stream, and their SHA-256."""

    boundary: int
    side: int
    channel: int
    shadow_id: int
    bytes: int
    sha256: str


class TaggedStream(StreamResult):
    """The bytes of a stream that its rank has tagged."""

    tails: tuple[TailResult, ...] = ()


class StreamDigest:
    """The number of a stream's bytes from `base` on, and their SHA-256; without `hashing`, it is empty."""

    def __init__(self, hashing: bool, base: int = 0) -> None:
        self.base = base
        self.bytes = 0
        self._hash = hashlib.sha256() if hashing else None

    @property
    def sha256(self) -> str:
        """The digest of the bytes so far."""
        return self._hash.hexdigest() if self._hash else ""

    def update(self, at: int, view: memoryview) -> None:
        """Add the stream's bytes at position `at`, without those before `base`."""
        tail = view[max(0, self.base - at) :]
        self.bytes += len(tail)
        if self._hash:
            self._hash.update(tail)


class Digests:
    """Digests of each stream and its tails; it collects views while the ring runs, and hashes them later."""

    def __init__(self, side: int, hashing: bool, tails: Sequence[Tail] = ()) -> None:
        self._side = side
        self._boundaries: dict[int, int] = {}  # by channel
        self._hashing = hashing
        self._tails = tails if hashing else ()
        self._views: dict[tuple[int, int], list[memoryview]] = {}
        self._digests: dict[tuple[int, int], list[StreamDigest]] = {}

    def expect(self, boundary: int, channel: int, shadow_id: int) -> None:
        """Add a stream beforehand, so that an empty one is reported and threads add no streams."""
        self._boundaries[channel] = boundary
        self._views[channel, shadow_id] = []
        self._digests[channel, shadow_id] = [StreamDigest(self._hashing)]

    def begin(self, iteration: int) -> None:
        """Begin an iteration; hash the views taken before."""
        for tail in self._tails:
            if tail.iteration == iteration:
                for digests in self._digests.values():
                    digests.append(StreamDigest(self._hashing, digests[0].bytes + tail.offset))

    def take(self, channel: int, shadow_id: int, view: memoryview) -> None:
        """Take a view of bytes that are tagged now; they must not change before `hash_taken`."""
        self._views[channel, shadow_id].append(view)

    def hash_taken(self) -> None:
        """Hash the views taken since the last call."""
        for stream, views in self._views.items():
            for view in views:
                at = self._digests[stream][0].bytes
                for digest in self._digests[stream]:
                    digest.update(at, view)
            views.clear()

    def results(self) -> list[TaggedStream]:
        """Return one result for each expected stream."""
        return [
            TaggedStream(
                boundary=self._boundaries[channel],
                side=self._side,
                channel=channel,
                shadow_id=shadow_id,
                bytes=whole.bytes,
                sha256=whole.sha256,
                tails=tuple(TailResult(base=t.base, bytes=t.bytes, sha256=t.sha256) for t in tails),
            )
            for (channel, shadow_id), (whole, *tails) in self._digests.items()
        ]
