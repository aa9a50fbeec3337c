"""What reduces gradients in place of Checkmate's ring: gloo, and a switch that is a process of this machine.

Both ranks reduce with gloo. Each sends what it would have tagged to the process with the emulated switch.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Final

import torch
import torch.distributed as dist

from checkmate.ring.place import RingError
from checkmate.state import bytes_of
from checkmate.training.gradients.reducer import Ends, Reducer, zero_buckets
from checkmate.training.gradients.staging import Staging, staging_for
from checkmate.training.start.places import Place, Start
from checkmate.wire.layout import Layout
from checkmate.wire.schedule import StreamLayout, stream_layout

HEADER: Final = struct.Struct("=BBBBQI")
"""Before a stream's bytes: boundary, channel, shard, incarnation, position in the stream, number of bytes."""


class GlooReducer:
    """The reducer of one of two ranks. It owns a connection to the switch, which `close` ends."""

    repairs = None

    def __init__(self, place: Place, layout: Layout, start: Start, switch: str) -> None:
        self.layout = layout
        self.tensors = zero_buckets(layout, torch.device("cpu"))
        self._place = place
        self._incarnation = start.plan.incarnation
        self._streams: dict[tuple[int, int], StreamLayout] = {
            (channel, shard): stream_layout(
                layout.schedule,
                place.job.channels,
                channel,
                place.ranks,
                side=place.position,
                shadow_id=shard,
                slicing=layout.slicing,
            )
            for channel in range(place.job.channels)
            for shard in range(place.shards)
        }
        self._iterations = 0
        """The number of iterations that were reduced completely since the start."""
        self._switch = socket.socket(socket.AF_UNIX)
        self._switch.connect(switch)
        self._on_done: Callable[[int], None] = lambda index: None

    def staging(self, device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
        """Return what copies gradients into our buckets and back."""
        return staging_for(device, on_error)

    def open(self, on_done: Callable[[int], None], on_error: Callable[[RingError], None]) -> None:
        """Begin; errors are raised by `submit`."""
        self._on_done = on_done

    def submit(self, index: int) -> None:
        """Reduce the next bucket at once. Raise `RingError` if the other rank is gone."""
        try:
            dist.all_reduce(self.tensors[index])
        except RuntimeError as error:
            raise RingError(f"the other rank does not reduce: {error}") from error
        self.tensors[index].div_(self._place.replicas)
        for (channel, shard), stream in self._streams.items():
            self._send(index, channel, shard, stream)
        self._iterations += index == len(self.tensors) - 1
        self._on_done(index)

    def _send(self, index: int, channel: int, shard: int, stream: StreamLayout) -> None:
        """Send the bytes of a bucket that belong to a stream of this rank."""
        data = bytes(bytes_of(self.tensors[index]))
        size = self.tensors[index].element_size()
        for piece in stream.pieces:
            if piece.bucket != index:
                continue
            payload = data[piece.where.start * size : piece.where.stop * size]
            boundary = 2 * self._place.group + self._place.position
            position = self._iterations * stream.nbytes + piece.offset
            header = HEADER.pack(boundary, channel, shard, self._incarnation, position, len(payload))
            self._switch.sendall(header + payload)

    def ends(self) -> dict[tuple[int, int], int]:
        """Return the end of each stream after the last iteration that is reduced."""
        return {key: self._iterations * stream.nbytes for key, stream in self._streams.items()}

    def is_acknowledged(self, ends: Ends) -> bool:
        """Return whether the switch has the bytes: they outlive this process once they are in its socket."""
        return True

    def give_up(self) -> None:
        """Do nothing: no other rank is on this host."""

    def close(self) -> None:
        """End the connection."""
        self._switch.close()


def reducer_over(switch: str) -> Callable[..., tuple[Reducer, list[str]]]:
    """Return what takes the place of `checkmate.training.gradients.setup.make_reducer`."""

    def make_reducer(
        place: Place,
        layouts: Mapping[int, Layout],
        start: Start,
        devices: Collection[torch.device],
        undo: ExitStack,
        *,
        required: bool,
        average: bool,
    ) -> tuple[Reducer, list[str]]:
        return GlooReducer(place, layouts[place.group], start, switch), []

    return make_reducer
