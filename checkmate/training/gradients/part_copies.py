"""Copies of this rank's part of the gradients to shadow nodes, with copies by hosts.

Gradients are taken as an optimizer steps, in the type and with the values that the step uses. So it does not
matter what has reduced, unscaled or clipped them before. All ranks of a DP group have the same ones. Each
rank copies one part of them to host memory, and a thread for each stream sends it on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from checkmate.keys.access import access
from checkmate.keys.roles import Role, Secret
from checkmate.ring.place import RingError
from checkmate.state import in_memory_order, local_of
from checkmate.training.errors import RefusedError
from checkmate.training.gradients.ddp_hook import RebuiltReduction, after_backward
from checkmate.training.gradients.part_route import Route
from checkmate.training.gradients.part_stream import PartStream
from checkmate.training.record.copied_state import CopiedState
from checkmate.training.start.places import Place, Start
from checkmate.wire.copies import PartGreeting, job_digest
from checkmate.wire.layout import Layout
from checkmate.wire.parameter import STATE_ITEMSIZES
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
                offset = piece.offset + (first - piece.where.start) * STATE_ITEMSIZES[bucket.dtype]
                where = range(first - place.start, stop - place.start)
                slices.append(PartSlice(place.parameter, where, offset))
    return slices


@dataclass(eq=False)
class ShardPiece:
    """A shard's piece of this rank's part: its streams, and memory for the iteration that is being taken."""

    streams: Sequence[PartStream]
    """One for each holder."""
    slices: Sequence[PartSlice]
    rooms: list[torch.Tensor | None] = field(default_factory=list)
    """Memory of the streams, in their order; `None` for a node that is too far behind."""
    data: torch.Tensor | None = None
    """The memory into which gradients are copied, on their device; `None` if all nodes are behind."""

    def begin(self, device: torch.device) -> None:
        """Get memory for an iteration of gradients on a device.

        A copy within a GPU takes a hundredth of the time of one to the host, so a step waits for that alone.
        """
        self.rooms = [stream.room() for stream in self.streams]
        self.data = next((room for room in self.rooms if room is not None), None)
        if self.data is not None and device.type == "cuda":
            self.data = torch.empty_like(self.data, device=device, pin_memory=False)

    def send(self, iteration: int, down: torch.cuda.Stream | None) -> None:
        """Have all streams send the iteration. From a GPU it comes `down` a stream, beside training."""
        data, await_data = self.data, None
        if data is not None and down is not None:
            await_data = self._come_down(data, down)
        for stream, room in zip(self.streams, self.rooms, strict=True):
            if down is None and room is not None and data is not None and room is not data:
                room.copy_(data)
            stream.put(iteration, room, None if room is None else await_data)
        self.rooms, self.data = [], None

    def _come_down(self, data: torch.Tensor, down: torch.cuda.Stream) -> Callable[[], None]:
        """Queue copies to the host; return what waits for them."""
        down.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(down):
            for room in self.rooms:
                if room is not None:
                    room.copy_(data, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(down)
        data.record_stream(down)
        return event.synchronize


class PartCopies:
    """This rank's part of each iteration: copied, sent to its holders, and followed until it is there.

    An iteration is a round of optimizer steps: `begin`, `take` before each step, `complete`. `close` ends the
    threads.
    """

    iteration: int
    """Number of the last iteration that began; `first_iteration` - 1 before the first."""
    error: RingError | None = None
    """Nothing breaks training here."""
    repairs = None
    """A stream that lacks something gets it on a new connection."""
    beside = b""
    """What of the optimizer's state is in none of the tensors, as plain state, if the state is copied."""
    is_due = False
    """Whether DDP has reduced gradients that no step has used: an iteration, also if none does."""

    def __init__(
        self, place: Place, layout: Layout, start: Start, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Create the streams, which connect once the nodes have begun this start of training."""
        self.iteration = start.next_iteration - 1
        self.first_iteration: Final = start.next_iteration
        self.layout: Final = layout
        self.parameters: Final = parameters
        devices = [parameter.device for parameter in parameters]
        self._device = next((device for device in devices if device.type == "cuda"), devices[0])
        pinned = self._device.type == "cuda"
        self._down = torch.cuda.Stream(self._device) if pinned else None  # type: ignore[no-untyped-call]
        allowed = access(place.job, Role.TRAINER)
        key, route = allowed.secret(Secret.GRADIENTS), Route.of(place.job, allowed)
        self._shards: list[ShardPiece] = []
        self._nbytes: dict[tuple[int, int], int] = {}
        self._untaken: set[int] | None = None  # parameters; `None` between iterations
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
                self._shards.append(ShardPiece(parts, part_slices(layout, stream)))
            self._streams = [part for shard_part in self._shards for part in shard_part.streams]
            for part in self._streams:
                part.start()
            self._undo = undo.pop_all()

    def begin(self) -> int:
        """Begin the next iteration, as its first step comes; return its number."""
        self.complete()
        self.iteration += 1
        self.is_due = False
        self._untaken = set(range(len(self.layout.parameters)))
        for part in self._shards:
            part.begin(self._device)
        return self.iteration

    def take(self, numbers: Collection[int]) -> None:
        """Copy the gradients that a step is about to use, of parameters by number. Missing ones are zeros.

        Raise `RefusedError` if a gradient is sparse, or if a CUDA graph would capture the copies.
        """
        if self._untaken is None:
            raise RuntimeError("no iteration has begun")
        self._refuse_graphs()
        for part in self._shards:
            if (data := part.data) is not None:
                self._copy(data, [piece for piece in part.slices if piece.parameter in numbers])
        self._untaken.difference_update(numbers)
        self.is_due = False

    def stepped(self, *, marking: bool) -> None:
        """Note that all optimizers have stepped: no step of the iteration follows."""
        self.complete()

    def capture(self) -> None:
        """Do nothing: gradients are copied as optimizers use them."""

    def complete(self) -> None:
        """Have the iteration sent, with zeros for parameters that no step has used."""
        if self._untaken is None:
            return
        untaken, self._untaken = self._untaken, None
        for part in self._shards:
            if (data := part.data) is not None:
                for part_slice in part.slices:
                    if part_slice.parameter in untaken:
                        self._place(data, part_slice).zero_()
            part.send(self.iteration, self._down)

    def _refuse_graphs(self) -> None:
        if self._down is not None and torch.cuda.is_current_stream_capturing():
            raise RefusedError(
                "a CUDA graph captures optimizer.step(), of which copies would be made once only: leave the "
                "step out of CUDA graphs"
            )

    def _place(self, data: torch.Tensor, part: PartSlice) -> torch.Tensor:
        itemsize = STATE_ITEMSIZES[self.layout.parameters[part.parameter].gradient_dtype]
        return data[part.offset : part.offset + len(part.where) * itemsize]

    def _copy(self, data: torch.Tensor, slices: Sequence[PartSlice]) -> None:
        """Copy slices of gradients as bytes, because types of different sizes follow one another."""
        places, elements = [], []
        for part in slices:
            if (flat := self._flat(part.parameter)) is None:
                self._place(data, part).zero_()
            else:
                places.append(self._place(data, part))
                elements.append(flat[part.where.start : part.where.stop].contiguous().view(torch.uint8))
        if places:
            torch._foreach_copy_(places, elements)

    def _flat(self, number: int) -> torch.Tensor | None:
        """Return a gradient, flat and in memory order; `None` if there is none."""
        described, gradient = self.layout.parameters[number], self.parameters[number].grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise RefusedError(
                f"{described.name} has a sparse gradient, which can't be copied: make its Embedding with "
                "sparse=False"
            )
        return in_memory_order(local_of(gradient).detach(), described.dim_order).reshape(-1)

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


class StateCopies(PartCopies):
    """This rank's part of the parameters and the optimizer's state after each iteration.

    They are copied as a script marks its end, with all that it has changed after the step; or after the step,
    if it marks none. An iteration without either is copied when it is over.
    """

    def __init__(self, place: Place, layout: Layout, start: Start, copied: CopiedState) -> None:
        """Create the streams. `copied` has the layout's tensors."""
        self._state = copied
        self._tells = copied.is_told_by(place.position)
        super().__init__(place, layout, start, copied.parameters)

    def take(self, numbers: Collection[int]) -> None:
        """Note that gradients are used, which are of no interest. Raise `RefusedError` in a CUDA graph."""
        self._refuse_graphs()
        self.is_due = False

    def stepped(self, *, marking: bool) -> None:
        """Copy all now, unless the script marks the iteration's end later."""
        if not marking:
            self.capture()

    def capture(self) -> None:
        """Copy all as it is now, in place of an earlier copy of the iteration.

        Raise `StateError` if the optimizer's state can't be copied.
        """
        if self._untaken is None:
            return
        self._state.look()
        self.beside = self._state.beside if self._tells else b""
        super().take(range(len(self.layout.parameters)))

    def complete(self) -> None:
        """Have the iteration sent, as it was captured. Raise as `capture`."""
        if self._untaken:
            self.capture()
        super().complete()

    def _flat(self, number: int) -> torch.Tensor | None:
        return self._state.flat(number)


class StepFront:
    """Tells when a backward begins. All else follows the optimizer's steps, which `steps` copies."""

    def __init__(self, outer: nn.Module, copies: PartCopies, resumed: RebuiltReduction | None) -> None:
        self.buckets = self.steps = copies
        self._outer = outer
        self._resumed = resumed
        self._handles: list[Any] = []
        self._begun_after = copies.iteration  # the iteration after which a backward has begun last
        self._task = -1  # autograd's number of the last backward

    def register(
        self,
        on_reduced: Callable[[int], None] = lambda iteration: None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `on_begun` as the first backward of each iteration begins.

        `on_reduced` is called at the end of each backward in which DDP reduces, with the iteration before it.
        """
        self._on_reduced, self._on_begun = on_reduced, on_begun
        self._handles.append(self._outer.register_forward_hook(self._forwarded))
        if self._resumed is not None:
            self._resumed.register()

    def close(self) -> None:
        """End the threads, and watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._resumed is not None:
            self._resumed.close()
        self.buckets.close()

    def _forwarded(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        reached = partial(self._reached, synchronises=getattr(module, "require_backward_grad_sync", False))
        for tensor in _find_tensors(output):  # type: ignore[no-untyped-call]
            if tensor.requires_grad:
                tensor.register_hook(reached)

    def _reached(self, gradient: torch.Tensor, *, synchronises: bool) -> None:
        """Note that a backward has come to what the model has returned. DDP `synchronises` in most."""
        task = torch._C._current_graph_task_id()
        if task == self._task:  # another output
            return
        self._task = task
        if self.buckets.is_due or self._begun_after <= self.buckets.iteration:
            self._begun_after = self.buckets.iteration + 1
            self._on_begun()
        if synchronises:
            before = self._versions()
            # After DDP's callback, which fills `.grad`.
            after_backward(lambda: after_backward(lambda: self._end(before)))

    def _end(self, before: Sequence[object]) -> None:
        """Note that DDP has reduced gradients, if there are new ones: `torch.autograd.grad` makes none."""
        if self._versions() != before:
            self.buckets.is_due = True
            self._on_reduced(self.buckets.iteration)

    def _versions(self) -> list[object]:
        """Return what changes with gradients."""
        gradients = [parameter.grad for parameter in self.buckets.parameters]
        return [gradient if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
