"""The DDP communication hook: lends the gradients of DDP's buckets to their reduction in our layout.

DDP's own buckets change after the first iteration and after a restart, so they only tell which parameters are
ready.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed's, where mypy finds it
from torch.nn.parallel import DistributedDataParallel

from checkmate.training.gradients.reducing import Reducer
from checkmate.training.gradients.reduction import GradientReduction
from checkmate.training.start.install import check_format
from checkmate.wire.layout import Layout


class GradientHook(GradientReduction):
    """The communication hook of one DDP."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        reducer: Reducer,
        first_iteration: int,
    ) -> None:
        super().__init__(layout, parameters, reducer, first_iteration)
        self._ddp = ddp
        self._numbers: dict[torch.Tensor, int] = {
            parameter: number for number, parameter in enumerate(parameters)
        }

    def register(self, on_reduced: Callable[[int], None] = lambda iteration: None) -> None:
        """Have DDP call the hook from now on, for good. DDP raises RuntimeError if it has another hook."""
        self.on_reduced = on_reduced
        self._ddp.register_comm_hook(self, GradientHook.run)

    def run(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce one of DDP's buckets; return a future of it. DDP calls this in backward's thread."""
        gradients = self._gradients_of(bucket)
        if gradients and not self._missing:
            self._begin()
        if self.iteration == self._first_iteration:
            for number, gradient in gradients.items():
                check_format(self._layout.parameters[number], gradient, self._parameters[number].grad)
        return self._lend(gradients, bucket.buffer())

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
            self._check_type(number, gradient)
            gradients[number] = gradient.view(-1)
        return gradients
