"""DDP's communication hooks: one for each way of copies.

`GradientHook`, for copies by switch, lends the gradients of DDP's buckets to those of our layout. DDP's own
buckets change after the first iteration and after a restart, so they only tell which parameters are ready.

With copies by hosts DDP reduces its own buckets. So a resumed process needs `RebuiltReduction`, in its first
iteration.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed's, where mypy finds them
    _DEFAULT_FIRST_BUCKET_BYTES,
    GradBucket,
    _compute_bucket_assignment_by_size,
)
from torch.nn.parallel import DistributedDataParallel

from checkmate.training.gradients.buckets import GradientBuckets
from checkmate.training.start.install import check_format


class GradientHook:
    """The communication hook of one DDP, whose gradients it lends."""

    steps = None
    on_reduced: Callable[[int], None]
    on_begun: Callable[[], None]

    def __init__(self, ddp: DistributedDataParallel, buckets: GradientBuckets) -> None:
        self.buckets = buckets
        self._ddp: DistributedDataParallel | None = ddp
        self._numbers: dict[torch.Tensor, int] = {
            parameter: number for number, parameter in enumerate(buckets.parameters)
        }

    def register(
        self,
        on_reduced: Callable[[int], None] = lambda iteration: None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Have DDP call the hook from now on, for good. DDP raises RuntimeError if it has another hook."""
        assert self._ddp is not None
        self.on_reduced, self.on_begun = on_reduced, on_begun
        self._ddp.register_comm_hook(self, type(self).run)
        # DDP's C++ part holds the hook, where the garbage collector can't see that the hook holds DDP.
        self._ddp = None

    def close(self) -> None:
        """End the threads and the reducer. DDP keeps the hook, which fails, and nothing else by it."""
        self.buckets.close()
        self.on_reduced, self.on_begun = lambda iteration: None, lambda: None

    def run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one of DDP's buckets; return a future of it. DDP calls this in backward's thread."""
        buckets = self.buckets
        gradients = self._gradients_of(bucket)
        if gradients and buckets.all_lent:
            iteration = buckets.begin()
            self.on_begun()
            after_backward(lambda: self._end(iteration))
        if buckets.iteration == buckets.first_iteration:
            for number, gradient in gradients.items():
                check_format(buckets.layout.parameters[number], gradient, buckets.parameters[number].grad)
        return buckets.lend(gradients, bucket.buffer())

    def _end(self, iteration: int) -> None:
        """Wait for the ring at the end of backward, before a last callback of DDP. Raise `RingError`.

        DDP would not keep the error's type, and would first wait for a collective that may fail, too.
        """
        self.buckets.wait()
        # After DDP's callback, which fills `.grad`.
        after_backward(lambda: self.on_reduced(iteration))

    def _gradients_of(self, bucket: GradBucket) -> dict[int, torch.Tensor]:
        """Return flat views of the bucket's gradients in memory order, by parameter, without empty ones.

        DDP stores a gradient in its bucket with the parameter's strides, but its views have only the shape.
        """
        if bucket.buffer().layout != torch.strided:
            raise RuntimeError("sparse gradients can't be protected; build the Embedding with sparse=False")
        gradients = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            number = self._numbers.get(parameter)
            if number is None:
                raise RuntimeError(
                    f"DDP reduces a parameter that was not protected: {tuple(parameter.shape)}"
                )
            if not gradient.numel():
                continue
            self.buckets.check_type(number, gradient)
            gradients[number] = gradient.view(-1)
        return gradients


def after_backward(work: Callable[[], None]) -> None:
    """Call `work` at the end of backward, or of its callbacks if this is one of them."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


class RebuiltReduction:
    """Reduces a resumed process's first iterations in the buckets into which DDP divides gradients later.

    DDP's first buckets follow the order of parameters, and the later ones that in which the first rank's
    gradients get ready. The sum of an element depends on its place in a bucket, so an uninterrupted run has
    the sums of the later ones. Gradients are copied for that, in these iterations alone. Afterwards it does
    what DDP does without a hook, because DDP can't unregister one.
    """

    def __init__(self, ddp: DistributedDataParallel, first_iteration: int) -> None:
        self._ddp: DistributedDataParallel | None = ddp
        self._group = ddp.process_group
        undivided = 2 if ddp.static_graph else 1  # iterations of each process with DDP's first buckets
        process = range(first_iteration, first_iteration + undivided)
        self._due = [iteration >= undivided for iteration in process]  # whether a run had others by then
        self._parameters = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._ready: dict[int, None] = {}  # numbers of parameters, in order of their last gradients
        self._flats: dict[int, torch.Tensor] = {}
        self._buckets: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def register(self) -> None:
        """Watch in which order gradients get ready, and have DDP call the hook from now on, for good."""
        assert self._ddp is not None
        self._ddp.register_comm_hook(self, type(self).run)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note) for parameter in self._parameters
        ]

    def close(self) -> None:
        """Watch no more, and reduce as DDP does without a hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._due = []
        self._ddp = None  # as of `GradientHook.register`

    def run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one of DDP's buckets; return a future of it. DDP calls this in backward's thread."""
        if not (self._due and self._due[0]):
            if bucket.is_last() and self._due:
                self._end_iteration()
            return self._reduced(bucket.buffer())
        devices: list[Any] | None = [bucket.buffer().device] if bucket.buffer().is_cuda else None
        future = torch.futures.Future[torch.Tensor](devices=devices)
        self._buckets.append((bucket.buffer(), future))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._flats[self._numbers[parameter]] = gradient.view(-1)
        if bucket.is_last():
            self._reduce_all()
            self._end_iteration()
        return future

    def _end_iteration(self) -> None:
        self._due.pop(0)
        self._ready.clear()
        if not self._due:
            self.close()

    def _note(self, parameter: torch.Tensor) -> None:
        number = self._numbers[parameter]
        self._ready.pop(number, None)  # of a micro-batch before, which DDP did not reduce
        self._ready[number] = None

    def _reduced(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average a flat tensor in place, with the bits of a DDP without a hook, which multiplies."""
        group = self._group
        work = dist.all_reduce(flat.mul_(1 / group.size()), group=group, async_op=True)
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda reduced: reduced.value()[0])

    def _reduce_all(self) -> None:
        for numbers in self._assignment():
            parts = [self._flats[number] for number in numbers]
            sums = torch.split(self._reduced(torch.cat(parts)).wait(), [part.numel() for part in parts])
            for part, reduced in zip(parts, sums, strict=True):
                part.copy_(reduced)
        for buffer, future in self._buckets:
            future.set_result(buffer)
        self._buckets.clear()
        self._flats.clear()

    def _assignment(self) -> list[list[int]]:
        """Return the parameters, by number, of DDP's later buckets."""
        order = self._first_ranks_order()
        ddp, places = self._ddp, list(range(len(order)))
        assert ddp is not None  # until the last iteration that is due
        first = _DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
        limits = [first, ddp.bucket_bytes_cap]
        tensors = [self._parameters[number] for number in order]
        buckets, _ = _compute_bucket_assignment_by_size(tensors, limits, [], places)
        return [[order[place] for place in bucket] for bucket in buckets]

    def _first_ranks_order(self) -> list[int]:
        """Return the order in which the first rank's gradients got ready, as DDP does: others may differ."""
        group = self._group
        missing = [number for number in self._flats if number not in self._ready]
        numbers = torch.tensor([*self._ready, *missing], dtype=torch.int64)
        numbers = numbers.to(next(iter(self._flats.values())).device)
        dist.broadcast(numbers, dist.get_global_rank(group, 0), group=group)
        return [int(number) for number in numbers.tolist()]


def resumed_reduction(ddp: DistributedDataParallel, first_iteration: int) -> RebuiltReduction | None:
    """Return what a process needs for its first iterations to have an uninterrupted run's bits.

    `None` if it begins a run, DDP keeps its buckets, has divided them already, or has a hook of the script's.
    """
    keeps = ddp.find_unused_parameters and not ddp.static_graph
    if not first_iteration or keeps or ddp._has_rebuilt_buckets:
        return None
    if ddp._get_ddp_logging_data().get("comm_hook"):  # type: ignore[no-untyped-call]
        return None
    return RebuiltReduction(ddp, first_iteration)
