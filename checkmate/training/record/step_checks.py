"""Checks that shadow nodes can repeat a step: all changes since the last one are in the step record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.training.errors import RefusedError
from checkmate.training.record.watch import GradientWatch, ParameterWatch
from checkmate.training.record.windows import Copy, Slices, Window


class StepChecks:
    """Checks one optimizer and, by name, the parameters whose gradients DDP averages.

    `slices`: selects parameters to check, on the group's first rank; `None` on other ranks.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], slices: Slices | None
    ) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        self._groups = self._group_ids()
        self.gradients = GradientWatch(list(names.items()))
        on_host = all(parameter.device.type == "cpu" for parameter in names.values())
        self._parameters = None if slices is None else ParameterWatch(slices, on_host=on_host)

    def check(self, arguments: Any, keywords: Any) -> None:
        """Raise `RefusedError` unless the optimizer may step with these arguments."""
        if len(arguments) > 1 or keywords.get("closure") is not None:
            raise RefusedError("optimizer.step(closure) can't be followed: call backward() before step()")
        if self._group_ids() != self._groups:
            raise RefusedError(
                "the optimizer's parameter groups were changed after checkmate.protect: add parameters "
                "before it"
            )
        changed = self._parameters.changed() if self._parameters is not None else []
        if changed:
            raise RefusedError(
                f"parameter {self._names[changed[0]]} was changed between two steps, and not by the "
                "optimizer: shadow nodes can't know how. Compute values derived from a parameter in the "
                "model's forward (torch.nn.utils.parametrize), and constrain parameters through the loss or "
                "the optimizer's options. To load other weights, close the protection, and protect the model "
                "in a new DDP"
            )
        self.check_gradients()

    def stepped(self, taken: list[tuple[Window, Copy]]) -> None:
        """Note these windows of parameters after the optimizer has stepped."""
        self.gradients.forget()
        if self._parameters is not None:
            self._parameters.stepped(taken)

    def check_gradients(self) -> None:
        """Raise `RefusedError` if gradients were changed in a way that the record can't express."""
        changed = self.gradients.changed()
        if changed:
            raise RefusedError(
                f"the gradient of {changed[0]} was changed between DDP's reduction and the optimizer's step, "
                "and shadow nodes can't know how: clip with checkmate.clip_grad_norm_, pass the GradScaler "
                "to checkmate.protect as scaler=, and make other changes before the reduction, in the loss "
                "or with Tensor.register_hook on parameters"
            )

    def _group_ids(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]


def check_even(ddp: DistributedDataParallel) -> None:
    """Raise `RefusedError` during and after `ddp.join()`: DDP stays prepared for ranks without a batch."""
    if ddp._join_config.enable:
        raise RefusedError(
            "ddp.join() is for ranks that run out of batches, but each rank of a protected model trains in "
            "every iteration: give all ranks the same number of batches, as DistributedSampler does, and "
            "remove it"
        )
