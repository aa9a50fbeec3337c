"""The DDP communication hook: lends the gradients of DDP's buckets to those of our layout.

DDP's own buckets change after the first iteration and after a restart, so they only tell which parameters are
ready.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch._C._distributed_c10d import GradBucket  # torch.distributed's, where mypy finds it
from torch.nn.parallel import DistributedDataParallel

from checkmate.training.gradients.buckets import CopiedGradients, GradientBuckets
from checkmate.training.start.install import check_format

Gradients = TypeVar("Gradients", bound=CopiedGradients)


class DdpFront(ABC, Generic[Gradients]):
    """The communication hook of one DDP, which calls `run` with each of its buckets."""

    on_reduced: Callable[[int], None]
    on_begun: Callable[[], None]

    def __init__(self, ddp: DistributedDataParallel, buckets: Gradients) -> None:
        self.buckets = buckets
        self._ddp = ddp

    def register(
        self,
        on_reduced: Callable[[int], None] = lambda iteration: None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Have DDP call the hook from now on, for good. DDP raises RuntimeError if it has another hook."""
        self.on_reduced, self.on_begun = on_reduced, on_begun
        self._ddp.register_comm_hook(self, type(self).run)

    @abstractmethod
    def run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one of DDP's buckets; return a future of it. DDP calls this in backward's thread."""

    @abstractmethod
    def close(self) -> None:
        """End the threads. DDP keeps the hook."""


class GradientHook(DdpFront[GradientBuckets]):
    """Lends the gradients of a DDP."""

    def __init__(self, ddp: DistributedDataParallel, buckets: GradientBuckets) -> None:
        super().__init__(ddp, buckets)
        self._numbers: dict[torch.Tensor, int] = {
            parameter: number for number, parameter in enumerate(buckets.parameters)
        }

    def close(self) -> None:
        """End the threads and the reducer. DDP keeps the hook, which fails."""
        self.buckets.close()

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
