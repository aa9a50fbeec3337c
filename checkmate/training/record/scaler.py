"""Follows a GradScaler: by what it unscales gradients, and whether it lets the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import OptState

from checkmate.rpc import shadow_pb2 as pb


class ScalerListener(Protocol):
    """Whom a scaler's doings are told."""

    def check_gradients(self) -> None:
        """Called before gradients are unscaled."""

    def scaled(self, kind: pb.Scaling.Kind.ValueType, factor: torch.Tensor) -> None:
        """They are."""

    def scaler_stepped(self, infinite: Sequence[torch.Tensor]) -> None:
        """`step` has returned; an infinity was found where one of these isn't zero."""

    def moved_on(self) -> None:
        """`update` has returned."""


class ScalerWatch:
    """Wraps `unscale_`, `step` and `update` of one GradScaler; it has no hooks of its own."""

    def __init__(self, scaler: Any, optimizer: torch.optim.Optimizer, listener: ScalerListener) -> None:
        self._scaler = scaler
        self._optimizer = optimizer
        self._listener = listener
        self._unscale, self._step, self._update = scaler.unscale_, scaler.step, scaler.update
        self._unscaled = False
        scaler.unscale_, scaler.step, scaler.update = self.unscale_, self.step, self.update

    def remove(self) -> None:
        """Give the scaler its own methods back."""
        del self._scaler.unscale_, self._scaler.step, self._scaler.update

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """`GradScaler.unscale_`, noted."""
        if optimizer is not self._optimizer or not self._scaler.is_enabled():
            self._unscale(optimizer)
            return
        self._listener.check_gradients()
        factor = self._scaler._scale.double().reciprocal().float()  # as GradScaler computes it
        self._unscale(optimizer)
        self._unscaled = True
        self._listener.scaled(pb.Scaling.UNSCALE, factor)

    def step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> float | None:
        """`GradScaler.step`, noted. A fused optimizer unscales by itself, and skips by itself."""
        if optimizer is not self._optimizer or not self._scaler.is_enabled():
            return self._passed(self._step(optimizer, *arguments, **keywords))
        # As the scaler knows it: a script may unscale and then not step.
        self._unscaled = self._scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        scale = self._scaler._scale.clone()
        result = self._step(optimizer, *arguments, **keywords)
        if not self._unscaled:
            self._listener.scaled(pb.Scaling.FUSED, scale)
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        # Cloned, for update() adds other optimizers' findings to the first of these.
        self._listener.scaler_stepped([one.clone() for one in found.values()])
        return self._passed(result)

    def update(self, *arguments: Any, **keywords: Any) -> None:
        """`GradScaler.update`, noted."""
        self._update(*arguments, **keywords)
        self._listener.moved_on()

    @staticmethod
    def _passed(result: Any) -> float | None:
        return None if result is None else float(result)
