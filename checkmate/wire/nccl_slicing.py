"""NCCL's slicing of a ring AllReduce: the elements of each send, and which sends are fully reduced. Pure.

It describes the SIMPLE protocol with one GPU per node, and collectives that are launched alone. Its sizes and
steps are parameters, because versions of NCCL differ: cells have 16 KiB from 2.29 on, and 8 KiB before. The
others are the same from 2.26 to 2.30. tests/wire/test_nccl_slicing.py compares it with recorded calls, and
tests/nccl/test_slicing.py with the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from checkmate.wire.schedule import FIRST, Bucket, Chunk, TaggedSlicing

KIND: Final = "nccl"
"""Its name in layouts."""

_ITEM_MAX: Final = 16
"""Bytes of the largest element, of which all sizes are multiples."""
_SIZE_MAX: Final = 1 << 30
_STEPS_MAX: Final = 64
_SLICES_MAX: Final = 8
CHUNK_LEAST: Final = 32 << 10
"""The smallest supported chunk. A shadow node keeps a place for each chunk, so chunks may not be tiny."""
_LEAST_SLICE: Final = 32
"""A slice has at least this part of its room in the buffer."""


@dataclass(frozen=True, slots=True)
class NcclSend:
    """One send of a rank on a channel.

    `step` is its number within the collective, as in the profiler's ProxyStep. `round` is negative for
    partial sums. From 0 on, it is the round of the AllGather. `where` are elements of the bucket.
    """

    step: int
    round: int
    chunk: int
    where: range


@dataclass(frozen=True, slots=True)
class NcclSlicing(TaggedSlicing):
    """NCCL's sizes in bytes, and its steps, which are parts of a connection's buffer."""

    cell: int = 16 << 10
    """Of what channels share out."""
    buffer: int = 4 << 20
    """Of a connection (NCCL_BUFFSIZE)."""
    alignment: int = 16
    """Of chunks, and, as a number of elements, of slices."""
    grain: int = 512
    """Of which the largest chunk is a multiple."""
    steps: int = 8
    """Of a buffer."""
    chunk_steps: int = 4
    """Of the largest chunk."""
    slice_steps: int = 2
    """Of a slice, which is one send. The last slices of a chunk may be empty."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for sizes and steps with which NCCL could not work."""
        for name in ("cell", "buffer", "alignment", "grain"):
            size = getattr(self, name)
            if not _ITEM_MAX <= size <= _SIZE_MAX or size % _ITEM_MAX:
                raise ValueError(
                    f"{name} {size}: must be a multiple of {_ITEM_MAX} bytes, at least {_ITEM_MAX}, "
                    f"at most {_SIZE_MAX}"
                )
        if not 1 <= self.slice_steps <= self.chunk_steps <= self.steps <= _STEPS_MAX:
            steps = f"{self.slice_steps}, {self.chunk_steps} and {self.steps}"
            raise ValueError(f"steps {steps} of slice, chunk and buffer: must ascend, from 1 to {_STEPS_MAX}")
        if self.chunk_steps % self.slice_steps or self.slices > _SLICES_MAX:
            raise ValueError(
                f"chunk_steps {self.chunk_steps}: must be a multiple of {self.slice_steps}, "
                f"at most {_SLICES_MAX * self.slice_steps}"
            )
        if self.chunk < CHUNK_LEAST:
            least = -(-CHUNK_LEAST * self.steps // self.chunk_steps)
            raise ValueError(
                f"buffer {self.buffer}: must be at least {least}, for chunks of {CHUNK_LEAST} bytes"
            )

    @property
    def slices(self) -> int:
        """Sends of each step of the ring."""
        return self.chunk_steps // self.slice_steps

    @property
    def chunk(self) -> int:
        """Bytes of the largest chunk."""
        return self.buffer // self.steps * self.chunk_steps // self.grain * self.grain

    def used_channels(self, elements: int, itemsize: int, channels: int, allowed: int = 0) -> int:
        """Return the number of channels that carry a bucket (see `part`)."""
        cells = _up(elements * itemsize, self.cell)
        return min(channels, _up(cells, self._share(elements * itemsize, allowed or channels)))

    def part(self, elements: int, itemsize: int, channels: int, channel: int, allowed: int = 0) -> range:
        """Return the elements of a bucket that `channel` of a communicator with `channels` carries.

        Args:
            elements: The elements of the bucket.
            itemsize: Bytes of an element.
            channels: The communicator's number of channels.
            channel: The channel, from 0.
            allowed: The channels that NCCL may use for the bucket. 0 stands for all, which a tuner ensures.
                NCCL may use one more than allowed, because it rounds down.
        """
        channel_count = self.used_channels(elements, itemsize, channels, allowed)
        if channel >= channel_count:
            return range(0)
        share = self._share(elements * itemsize, allowed or channels) * (self.cell // itemsize)
        return range(elements)[
            share * channel : elements if channel == channel_count - 1 else share * (channel + 1)
        ]

    def sends(self, part: range, itemsize: int, ranks: int, index: int) -> Iterator[NcclSend]:
        """Yield all sends of the rank at `index` of the ring, in order.

        Args:
            part: The elements of the channel.
            itemsize: Bytes of an element.
            ranks: The number of ranks in the ring.
            index: The rank's place: its distance from rank 0 of the communicator.
        """
        step, rounds = 0, range(1 - ranks, ranks - 1)
        while part:
            chunk = self._chunk(len(part), itemsize, ranks)
            for round_ in rounds:
                number = (index - round_ if round_ >= 0 else index - round_ - ranks) % ranks
                for where in self._slices(part[number * chunk : (number + 1) * chunk], itemsize):
                    yield NcclSend(step, round_, number, where)
                    step += 1
            part = part[ranks * chunk :]

    def tagged(self, part: range, itemsize: int, ranks: int, side: int) -> Iterator[NcclSend]:
        """Yield the sends that a boundary's rank tags: the first one round 0, the last one every round.

        Both together carry each reduced element once (design, section 3).
        """
        for send in self.sends(part, itemsize, ranks, 0 if side == FIRST else ranks - 1):
            if send.where and (send.round == 0 or (send.round > 0 and side != FIRST)):
                yield send

    def tagged_chunks(
        self, bucket: Bucket, channels: int, channel: int, ranks: int, side: int
    ) -> Iterator[Chunk]:
        """Yield the tagged sends of one bucket in a boundary's stream on `channel`, in order."""
        part = self.part(bucket.elements, bucket.itemsize, channels, channel)
        for send in self.tagged(part, bucket.itemsize, ranks, side):
            yield Chunk(send.round, send.chunk, send.where)

    def describe(self) -> Mapping[str, str | int]:
        """Return its name, as `kind`, and its parameters."""
        return {"kind": KIND, **asdict(self)}

    def _share(self, nbytes: int, allowed: int) -> int:
        """Return the cells of each channel but the last. An AllReduce moves each byte twice."""
        return max(1, _up(2 * nbytes // allowed, 2 * self.cell))

    def _chunk(self, remaining: int, itemsize: int, ranks: int) -> int:
        """Return the elements of a chunk in a loop over the ring that begins with `remaining` elements."""
        whole = self.chunk // itemsize
        if remaining >= ranks * whole:
            return whole
        line = self.alignment // itemsize
        return _up(_up(remaining, ranks), line) * line

    def _slices(self, chunk: range, itemsize: int) -> Iterator[range]:
        least = self.buffer // self.steps // itemsize * self.slice_steps // _LEAST_SLICE
        size = max(_up(len(chunk), self.alignment * self.slices) * self.alignment, least)
        for first in range(0, self.slices * size, size):
            yield chunk[first : first + size]


def _up(number: int, by: int) -> int:
    """Return number / by, rounded up."""
    return -(-number // by)
