"""NCCL's slicing of a ring AllReduce: the elements of each send, and which sends are fully reduced. Pure.

It describes the SIMPLE protocol with one GPU per node, and collectives that are launched alone. Its sizes are
parameters, because versions of NCCL differ in them: cells have 16 KiB from 2.29 on, and 8 KiB before.
tests/wire/test_nccl_slicing.py compares it with recorded calls of NCCL, and tests/nccl/test_slicing.py with
the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from checkmate.wire.schedule import FIRST

SLICES: Final = 2
"""Sends of each step of the ring; the second may be empty."""
_LINE: Final = 16
"""Bytes to which chunks are aligned, and elements of which slices are multiples."""
_STEPS: Final = 8
"""Parts of a connection's buffer, of which a chunk has four, and a send at most two."""
_CHUNK_UNIT: Final = 512


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
class NcclSlicing:
    """Sizes in bytes: of the cells that channels share out, and of a connection's buffer (NCCL_BUFFSIZE)."""

    cell: int = 16 << 10
    buffer: int = 4 << 20

    def __post_init__(self) -> None:
        """Raise `ValueError` for sizes that NCCL does not have."""
        for name, size, least in (("cell", self.cell, _LINE), ("buffer", self.buffer, 2 * _CHUNK_UNIT)):
            if size < least or size % _LINE:
                raise ValueError(f"{name} {size}: must be a multiple of {_LINE} bytes, at least {least}")

    def used(self, elements: int, itemsize: int, channels: int, allowed: int = 0) -> int:
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
        used = self.used(elements, itemsize, channels, allowed)
        if channel >= used:
            return range(0)
        share = self._share(elements * itemsize, allowed or channels) * (self.cell // itemsize)
        return range(elements)[share * channel : elements if channel == used - 1 else share * (channel + 1)]

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

    def _share(self, nbytes: int, allowed: int) -> int:
        """Return the cells of each channel but the last. An AllReduce moves each byte twice."""
        return max(1, _up(2 * nbytes // allowed, 2 * self.cell))

    def _chunk(self, left: int, itemsize: int, ranks: int) -> int:
        """Return the elements of a chunk in a loop over the ring that begins with `left` elements."""
        whole = self.buffer // _STEPS * 4 // _CHUNK_UNIT * _CHUNK_UNIT // itemsize
        if left >= ranks * whole:
            return whole
        line = _LINE // itemsize
        return _up(_up(left, ranks), line) * line

    def _slices(self, chunk: range, itemsize: int) -> Iterator[range]:
        least = self.buffer // _STEPS // itemsize * 2 // (_LINE * SLICES)
        size = max(_up(len(chunk), _LINE * SLICES) * _LINE, least)
        for first in range(0, SLICES * size, size):
            yield chunk[first : first + size]


def _up(number: int, by: int) -> int:
    """Return number / by, rounded up."""
    return -(-number // by)
