"""Copies of this rank's part of the gradients to shadow nodes, with copies by hosts.

DDP reduces its own buckets, in place, over the script's own process group. As backward ends, `.grad` has the
reduced gradients, which are the same on all ranks of a DP group. Each rank copies one part of them to host
memory, and a thread for each stream sends it on.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import (  # torch.distributed's, where mypy finds them
    _DEFAULT_FIRST_BUCKET_BYTES,
    GradBucket,
    _compute_bucket_assignment_by_size,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from checkmate.keys.access import access
from checkmate.keys.roles import Role, Secret
from checkmate.ring.place import RingError
from checkmate.state import in_memory_order
from checkmate.training.gradients.ddp_hook import DdpFront, after_backward
from checkmate.training.gradients.part_route import Route
from checkmate.training.gradients.part_stream import PartStream
from checkmate.training.start.places import Place, Start
from checkmate.wire.copies import PartGreeting, job_digest
from checkmate.wire.layout import Layout
from checkmate.wire.parameter import ITEMSIZES
from checkmate.wire.schedule import StreamLayout, StreamName


class PartSlice(NamedTuple):
    """Elements of a parameter's gradient, in memory order, and their first byte in the part."""

    parameter: int
    where: range
    offset: int


def part_slices(layout: Layout, stream: StreamLayout) -> list[PartSlice]:
    """Return the elements of which a stream's iteration consists, in order."""
    slices = []
    for piece in stream.pieces:
        bucket = layout.buckets[piece.bucket]
        for place in bucket.places:
            first, stop = max(place.start, piece.where.start), min(place.stop, piece.where.stop)
            if first < stop:
                offset = piece.offset + (first - piece.where.start) * ITEMSIZES[bucket.dtype]
                where = range(first - place.start, stop - place.start)
                slices.append(PartSlice(place.parameter, where, offset))
    return slices


class PartCopies:
    """This rank's part of each iteration: copied, sent to its holders, and followed until it is there.

    `close` ends the threads.
    """

    iteration: int
    """Number of the last synchronising backward that began; `first_iteration` - 1 before the first."""
    error: RingError | None = None
    """Nothing breaks training here."""

    def __init__(
        self, place: Place, layout: Layout, start: Start, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Create the streams, which connect once the nodes have begun this start of training."""
        self.iteration = start.next_iteration - 1
        self.first_iteration: Final = start.next_iteration
        self.layout: Final = layout
        self.parameters: Final = parameters
        pinned = any(parameter.device.type == "cuda" for parameter in parameters)
        allowed = access(place.job, Role.TRAINER)
        key, route = allowed.secret(Secret.GRADIENTS), Route.of(place.job, allowed)
        self._shards: list[tuple[list[PartStream], list[PartSlice]]] = []  # a stream for each holder
        self._nbytes: dict[tuple[int, int], int] = {}
        laid = {
            shard: layout.slicing.stream(
                layout.schedule, StreamName(place.position, 0, shard), 1, place.ranks
            )
            for shard in range(layout.shards)
        }
        total = sum(stream.nbytes * len(place.holders(shard)) for shard, stream in laid.items())
        with ExitStack() as undo:
            for shard, stream in laid.items():
                if not stream.nbytes:
                    continue
                self._nbytes[0, shard] = stream.nbytes
                greeting = PartGreeting(
                    group=place.group,
                    position=place.position,
                    shard=shard,
                    incarnation=start.plan.incarnation,
                    nbytes=stream.nbytes,
                    job=job_digest(place.job.job),
                    start=start.plan.start,
                    nonce=bytes(16),
                )
                way = route.share(stream.nbytes, total)
                holders = place.holders(shard)
                parts = [PartStream(node, greeting, key, pinned=pinned, route=way) for node in holders]
                for part in parts:
                    undo.callback(part.close)
                self._shards.append((parts, part_slices(layout, stream)))
            self._streams = [part for parts, _ in self._shards for part in parts]
            for part in self._streams:
                part.start()
            self._undo = undo.pop_all()

    def begin(self) -> int:
        """Begin the next iteration; return its number."""
        self.iteration += 1
        return self.iteration

    def take(self, iteration: int) -> None:
        """Copy the part from `.grad`, and have it sent. Gradients that are missing are zeros."""
        for streams, slices in self._shards:
            filled: torch.Tensor | None = None
            for stream in streams:
                room = stream.room()
                if room is not None and filled is not None:
                    room.copy_(filled)  # gradients may be on a device, and this is not
                elif room is not None:
                    for part in slices:
                        self._copy(room, part)
                    filled = room
                stream.put(iteration, room)

    def _flat(self, number: int) -> torch.Tensor | None:
        """Return a gradient, flat and in memory order."""
        gradient = self.parameters[number].grad
        if gradient is None:
            return None
        return in_memory_order(gradient, self.layout.parameters[number].dim_order).reshape(-1)

    def _copy(self, data: torch.Tensor, part: PartSlice) -> None:
        itemsize = ITEMSIZES[self.layout.parameters[part.parameter].gradient_dtype]
        place = data[part.offset : part.offset + len(part.where) * itemsize]
        if (flat := self._flat(part.parameter)) is None:
            place.zero_()
        else:
            place.copy_(flat[part.where.start : part.where.stop].contiguous().view(torch.uint8))

    def stream_ends(self, iteration: int) -> dict[tuple[int, int], int]:
        """Return each stream's bytes, by channel and shard, at the end of this iteration."""
        count = iteration - self.first_iteration + 1
        return {key: nbytes * count for key, nbytes in self._nbytes.items()}

    def has_passed(self, node: int, iteration: int, ends: Mapping[tuple[int, int], int]) -> bool:
        """Return whether a node has this rank's part of an iteration; also true if it is away."""
        return all(stream.has(iteration) for stream in self._streams if stream.node.id == node)

    def give_up(self) -> None:
        """Do nothing: no other rank waits for this one."""

    def close(self) -> None:
        """End the threads. What was not sent is lost."""
        self._undo.close()


class DdpCopies(DdpFront[PartCopies]):
    """A DDP whose own reduction stays as it is, and whose reduced gradients are copied."""

    def __init__(self, ddp: DistributedDataParallel, copies: PartCopies) -> None:
        super().__init__(ddp, copies)
        self._resumed = RebuiltReduction(ddp) if copies.first_iteration and rebuilds(ddp) else None

    def close(self) -> None:
        """End the threads. DDP keeps the hook."""
        if self._resumed is not None:
            self._resumed.close()
        self.buckets.close()

    def run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one of DDP's buckets as DDP does. It calls this in backward's thread, bucket 0 first."""
        if bucket.index() == 0:
            iteration = self.buckets.begin()
            self.on_begun()
            # After DDP's callback, which fills `.grad`.
            after_backward(lambda: after_backward(lambda: self._end(iteration)))
        if self._resumed is not None and self.buckets.iteration == self.buckets.first_iteration:
            return self._resumed.reduce(bucket)
        return allreduce_hook(self._ddp.process_group, bucket)

    def _end(self, iteration: int) -> None:
        self.buckets.take(iteration)
        self.on_reduced(iteration)


def rebuilds(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP divides gradients into other buckets after its first iteration."""
    return ddp.static_graph or not ddp.find_unused_parameters


class RebuiltReduction:
    """Reduces a resumed process's first iteration in the buckets into which DDP divides gradients after it.

    DDP's first buckets follow the order of parameters, and the later ones that in which gradients get ready.
    The sum of an element depends on its place in a bucket, so an uninterrupted run has the sums of the later
    ones. Gradients are copied for that, in this iteration alone.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Watch in which order gradients get ready."""
        self._ddp = ddp
        self._ready: list[torch.Tensor] = []
        self._flats: dict[torch.Tensor, torch.Tensor] = {}
        self._buckets: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)
            for parameter in ddp._module_parameters
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future of one of DDP's buckets, all of which are reduced once the last one comes."""
        future = torch.futures.Future[torch.Tensor]()
        self._buckets.append((bucket.buffer(), future))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._flats[parameter] = gradient.view(-1)
        if bucket.is_last():
            self.close()
            self._reduce_all()
        return future

    def _note(self, parameter: torch.Tensor) -> None:
        self._ready.append(parameter)

    def _reduce_all(self) -> None:
        group = self._ddp.process_group
        for numbers in self._assignment():
            parts = [self._flats[self._ready[number]] for number in numbers]
            flat = torch.cat(parts).div_(group.size())
            dist.all_reduce(flat, group=group)
            sums = torch.split(flat, [part.numel() for part in parts])
            for part, reduced in zip(parts, sums, strict=True):
                part.copy_(reduced)
        for buffer, future in self._buckets:
            future.set_result(buffer)
        self._buckets.clear()
        self._flats.clear()

    def _assignment(self) -> list[list[int]]:
        """Return DDP's later buckets: numbers in the order in which gradients got ready."""
        ddp, numbers = self._ddp, list(range(len(self._ready)))
        first = _DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
        limits = [first, ddp.bucket_bytes_cap]
        buckets, _ = _compute_bucket_assignment_by_size(self._ready, limits, [], numbers)
        return buckets
