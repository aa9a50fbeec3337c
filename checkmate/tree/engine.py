"""Moves the bytes of buckets through both trees: one thread a channel, which waits for all links at once.

A rank has up to eight links on a channel, most of which wait for another one. With a thread for each, a slice
would wait for two of the interpreter's switches at each rank that it passes; here it passes in one. A root
waits for acknowledgements alone, too, if more of its chunks are on their way than the tagger has room for.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from checkmate.ring.engine import Engine, Worker, byte_view
from checkmate.ring.place import RingError
from checkmate.ring.steps import Arrival
from checkmate.tree.connections import Tree, TreeEnd
from checkmate.tree.progress import SLICE_BYTES, SliceSequence, TreeProgress, TreeWay, tree_slices
from checkmate.wire.schedule import SIDES, Bucket
from checkmate.wire.tree import tree_place


@dataclass
class _Flow:
    """What passes one end of a connection."""

    end: TreeEnd
    progress: TreeProgress
    sequence: SliceSequence
    chunks: Sequence[tuple[int, int | None]]
    """Of an iteration, with their tags."""
    scratch: torch.Tensor
    """Where bytes arrive that are added."""
    scratch_view: memoryview
    offset: int = 0
    """Bytes of the next slice that have passed."""
    has_begun: bool = False
    """Whether the slice's beginning was announced, if it is sent."""

    @property
    def socket(self) -> socket.socket:
        """The connection."""
        end = self.end
        sock = end.receiver if end.sender is None else end.sender.socket
        assert sock is not None
        return sock


class TreeEngine(Engine):
    """Averages buckets over both trees, on all channels."""

    def __init__(
        self,
        tree: Tree,
        buckets: Sequence[Bucket],
        on_done: Callable[[int], None],
        on_error: Callable[[RingError], None],
        *,
        divisor: int,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        super().__init__(tree, buckets, on_done, on_error, divisor=divisor)
        self._tree = tree
        channels = range(tree.place.channels)
        self._progress: list[list[tuple[TreeProgress, SliceSequence]]] = [[] for _ in channels]
        self._flows: list[list[_Flow]] = [[] for _ in channels]
        for channel in channels:
            for side in SIDES:
                parts = [*tree_slices(buckets, len(channels), channel, side, slice_bytes)]
                sequence = SliceSequence.of(parts, len(buckets))
                progress = TreeProgress(tree_place(tree.place.ranks, tree.place.rank, side))
                self._progress[channel].append((progress, sequence))
                chunks = [(part.chunk, buckets[part.bucket].shadow_id) for part in parts if part.chunk]
                for end in tree.ends[channel, side]:
                    adds = end.link.way is TreeWay.SUM_IN
                    scratch = torch.empty(slice_bytes if adds else 0, dtype=torch.uint8)
                    flow = _Flow(end, progress, sequence, chunks, scratch, byte_view(scratch))
                    self._flows[channel].append(flow)
        self._wake_lock = threading.Lock()
        self._wakes = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in channels]

    def submit(self, index: int) -> None:
        """Start work on the next bucket, as `Engine.submit`."""
        super().submit(index)
        self._wake()

    def close(self) -> None:
        """End the threads. If buckets are in progress, this breaks the connections."""
        super().close()
        with self._wake_lock:
            wakes, self._wakes = self._wakes, []
            for wake in wakes:
                os.close(wake)

    def _workers(self) -> Iterator[Worker]:
        for channel in range(self._tree.place.channels):
            yield Worker(f"tree {channel}", self._pass_on, channel)

    def _end(self) -> None:
        super()._end()
        self._wake()

    def _wake(self) -> None:
        """Have threads look at `_submitted` again."""
        with self._wake_lock:  # after `close`, the numbers may be those of other files
            for wake in self._wakes:
                os.eventfd_write(wake, 1)

    def _pass_on(self, channel: int) -> None:
        """Pass slices on as far as they have come, and wait for more, until the engine ends."""
        trees, flows, wake = self._progress[channel], self._flows[channel], self._wakes[channel]
        count = 0  # of buckets that are finished
        while not self._submitted.has_ended:
            submitted = self._submitted.value
            for progress, sequence in trees:
                progress.submit(sequence.slices_until(submitted))
            moved = [flow for flow in flows if self._move(channel, flow)]
            while count < submitted and all(p.complete >= s.slices_until(count + 1) for p, s in trees):
                self._finish(count % len(self._buckets))
                count += 1
            if not moved and self._submitted.value == submitted:
                poll = select.poll()
                poll.register(wake, select.POLLIN)
                for flow in flows:
                    if flow.progress.may_pass(flow.end.link):
                        way = select.POLLOUT if flow.end.link.way.sends else select.POLLIN
                        poll.register(flow.socket, way)
                poll.poll()
                with suppress(BlockingIOError):
                    os.eventfd_read(wake)

    def _move(self, channel: int, flow: _Flow) -> bool:
        """Pass on what may pass now. Return whether anything has moved."""
        has_moved = False
        while flow.progress.may_pass(flow.end.link):
            try:
                count = self._send(channel, flow) if flow.end.link.way.sends else self._receive(flow)
            except OSError as error:
                way = "to" if flow.end.link.way.sends else "from"
                raise self._broken(channel, way, flow.end.peer, error) from error
            if not count:
                break
            has_moved = True
        return has_moved

    def _send(self, channel: int, flow: _Flow) -> int:
        """Send the next bytes of a slice; return how many the kernel took."""
        sender, link = flow.end.sender, flow.end.link
        assert sender is not None
        number = flow.progress.passed(link)
        part = flow.sequence.slice(number)
        view = self._views[part.bucket][part.start : part.stop]
        if not flow.has_begun:  # the kernel may have taken nothing of it, so its offset does not tell
            flow.has_begun = True
            is_tagged = self._tags(flow)
            shadow_id = self._buckets[part.bucket].shadow_id if is_tagged else None
            if is_tagged and number % len(flow.sequence.slices) == 0:
                sender.plan(flow.chunks)
            if part.chunk:
                sender.begin_chunk(part.chunk, shadow_id)
            if shadow_id is not None and self._on_tagged is not None:
                self._on_tagged(self._tree.place.channels + channel, shadow_id, view)
        count = sender.write_now(view[flow.offset :])
        self._advance(flow, count, part.stop - part.start)
        return count

    def _tags(self, flow: _Flow) -> bool:
        """Return whether a flow is tagged: a root's result."""
        return flow.end.link.way is TreeWay.RESULT_OUT and flow.progress.is_root

    def _receive(self, flow: _Flow) -> int:
        """Receive the next bytes of a slice, and add the slice if it is whole; return how many came."""
        receiver, link = flow.end.receiver, flow.end.link
        assert receiver is not None
        part = flow.sequence.slice(flow.progress.passed(link))
        length = part.stop - part.start
        arrival = flow.progress.arrival(link)
        keeps = arrival is Arrival.KEEP
        target: Any = self._views[part.bucket][part.start : part.stop] if keeps else flow.scratch_view
        try:
            count = receiver.recv_into(
                target[flow.offset : length], length - flow.offset, socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionResetError("the connection ended")
        if flow.offset + count == length and not keeps:
            self._reduce(self._tensors[part.bucket], flow.scratch, part.start, part.stop, arrival)
        self._advance(flow, count, length)
        return count

    def _advance(self, flow: _Flow, count: int, length: int) -> None:
        flow.offset += count
        if flow.offset == length:
            flow.offset, flow.has_begun = 0, False
            flow.progress.note_passed(flow.end.link)
