"""What a rank notes of each iteration: what its optimizer was about to do, and all that a resumed run needs.

Hooks on DDP, the optimizer and the scaler only note; a thread of `publish` makes a message of it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.optimizers import options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training import clip, rng
from checkmate.training.scaling import ScalerWatch
from checkmate.training.slices import Buffers, Later, Slices, Window
from checkmate.training.steps import Steps
from checkmate.training.watch import GradientWatch

_log: Final = logging.getLogger("checkmate")


class RefusedError(RuntimeError):
    """A training script did what shadow nodes can't repeat: the message says what to do instead."""


class Fault:
    """What a background thread has found; the script's next step raises it."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def set(self, error: Exception) -> None:
        """From any thread."""
        self.error = error

    def check(self) -> None:
        """Raise what was found."""
        if self.error is not None:
            raise self.error


@dataclass
class Scaled:
    """Gradients were multiplied (or divided, by a fused optimizer) by a factor."""

    kind: pb.Scaling.Kind.ValueType
    factor: torch.Tensor
    parameters: Sequence[int] = ()


@dataclass
class Noted:
    """One iteration of one rank. What only the group's first rank says is empty on others."""

    iteration: int
    ends: Mapping[tuple[int, int], int]
    rng: dict[str, Any]
    extra: Any
    stepped: bool = False
    last: bool = False
    infinite: Sequence[torch.Tensor] = ()  # not zero: the scaler made the optimizer skip
    options: list[str] = field(default_factory=list)
    next_options: list[str] = field(default_factory=list)
    without_gradient: list[int] = field(default_factory=list)
    scaled: list[Scaled] = field(default_factory=list)
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    slices: list[tuple[Window, Later]] = field(default_factory=list)
    buffers: dict[str, Later] = field(default_factory=dict)

    def skipped(self) -> bool:
        """Whether parameters are what they were; waits for a CUDA device."""
        return not self.stepped or any(bool(found.item()) for found in self.infinite)


@dataclass(frozen=True)
class Watched:
    """The objects of a training script that a rank's records are about."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    scaler: Any = None
    extra: Callable[[], Any] | None = None


class Recorder:
    """Notes iterations, from hooks that it registers; `emit` gets each once the next forward has begun.

    `slices`: the group's first rank's, which also says what the optimizer does; `None` on others.
    """

    def __init__(
        self,
        watched: Watched,
        names: Mapping[str, nn.Parameter],
        steps: Steps,
        emit: Callable[[Noted], None],
        stream_ends: Callable[[int], Mapping[tuple[int, int], int]],
        fault: Fault,
        slices: Slices | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self._watched = watched
        self._steps = steps
        self._emit = emit
        self._stream_ends = stream_ends
        self._fault = fault
        self._slices = slices
        self._buffers = buffers
        self._numbers = {id(p): number for number, p in enumerate(names.values())}
        self._groups = [[id(p) for p in group["params"]] for group in watched.optimizer.param_groups]
        self._stepped_ids = {i for group in self._groups for i in group}
        self._gradients = GradientWatch(list(names.items()))
        self._open: Noted | None = None
        self._accumulated = False
        self._parameters = list(names.values())
        # First: a thing that is no scaler is an error, and leaves no hook behind.
        self._scaler = (
            ScalerWatch(watched.scaler, watched.optimizer, self) if watched.scaler is not None else None
        )
        self._handles = [
            watched.optimizer.register_step_pre_hook(self._before_step),
            watched.optimizer.register_step_post_hook(self._after_step),
            watched.ddp.register_forward_pre_hook(self._before_forward),
        ]
        self._clipping = clip.Listener(self._parameters, self._before_scaling, self._clipped)

    def reduced(self, iteration: int) -> None:
        """DDP has finished an iteration's backward: gradients are what shadow nodes get."""
        if self._open is not None:
            self._finish(self._open)
        self._open = Noted(iteration, self._stream_ends(iteration), rng.capture(), self._extra())
        self._gradients.start()

    def close(self, last: bool) -> None:
        """Note no more. `last`: the iteration that is open is over, if its optimizer has stepped or skipped.

        After an error it may lack its step, or the scheduler's: then nobody may resume from it. Calling it
        again does nothing.
        """
        if self._open is not None and last and not self._lacks_step(self._open):
            self._open.last = True
            self._finish(self._open)
        self._open = None
        self._gradients.forget()
        for handle in self._handles:
            handle.remove()
        self._clipping.close()
        if self._scaler is not None:
            self._scaler.remove()
            self._scaler = None

    def scaled(self, kind: pb.Scaling.Kind.ValueType, factor: torch.Tensor) -> None:
        """The scaler has unscaled all gradients."""
        if self._open is not None:
            self._open.scaled.append(Scaled(kind, factor))
            self._gradients.note()

    def scaler_stepped(self, infinite: Sequence[torch.Tensor]) -> None:
        """`scaler.step()` has returned; where it found an infinity, the optimizer has skipped."""
        if self._open is not None:
            self._open.infinite = infinite
            self._take_stock(self._open)

    def check_gradients(self) -> None:
        """`RefusedError` where gradients were changed by what the record can't say."""
        changed = self._gradients.changed() if self._open is not None else []
        if changed:
            raise RefusedError(
                f"the gradient of {changed[0]} was changed between DDP's reduction and the optimizer's step, "
                "and shadow nodes can't know how: clip with checkmate.clip_grad_norm_, give "
                "checkmate.protect the GradScaler as scaler=, and make other changes before the reduction, "
                "in the loss or by Tensor.register_hook on parameters"
            )

    _before_scaling = check_gradients

    def _clipped(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> None:
        if self._open is None:
            return
        ids = {id(p) for p in parameters}
        chosen = (
            [] if ids >= self._stepped_ids else sorted(self._numbers[i] for i in ids if i in self._numbers)
        )
        self._open.scaled.append(Scaled(pb.Scaling.CLIP, coefficient, chosen))
        self._gradients.note()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        """A forward that trains ends the iteration before it: schedulers and the scaler have moved on."""
        if self._open is not None and module.training and torch.is_grad_enabled():
            self._finish(self._open)

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        self._fault.check()
        if len(arguments) > 1 or keywords.get("closure") is not None:
            raise RefusedError("optimizer.step(closure) can't be followed: call backward() before step()")
        noted = self._open
        if noted is None or noted.stepped:
            raise RefusedError(
                "optimizer.step() without a backward of its own: each step comes after one synchronising "
                "backward (of those accumulated with no_sync, the last) and before the next forward"
            )
        self._check_groups()
        self.check_gradients()
        if self._slices is not None:
            groups = optimizer.param_groups
            noted.options = [options_of(group) for group in groups]
            noted.without_gradient = [
                self._numbers[id(p)]
                for group in groups
                for p in group["params"]
                if p.grad is None and id(p) in self._numbers
            ]
        self._steps.begin()

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        noted = self._open
        if noted is not None:
            noted.stepped = True
            self._gradients.forget()
            if self._slices is not None:
                noted.slices = self._slices.take()
            self._take_stock(noted)
            self._steps.end(noted.iteration)

    def _take_stock(self, noted: Noted) -> None:
        noted.rng, noted.extra = rng.capture(), self._extra()

    def _extra(self) -> Any:
        return None if self._watched.extra is None else copy.deepcopy(self._watched.extra())

    def _check_groups(self) -> None:
        if [
            [id(p) for p in group["params"]] for group in self._watched.optimizer.param_groups
        ] != self._groups:
            raise RefusedError(
                "the optimizer's parameter groups were changed after checkmate.protect: add parameters "
                "before it"
            )

    def _finish(self, noted: Noted) -> None:
        self._open = None
        self._gradients.forget()
        if not noted.stepped:
            self._passed_over(noted)
        if self._slices is not None:
            watched = self._watched
            noted.next_options = [options_of(group) for group in watched.optimizer.param_groups]
            noted.scheduler = _state_of(watched.scheduler)
            noted.scaler = _state_of(watched.scaler)
        if self._buffers is not None:
            noted.buffers = self._buffers.take()
        self._emit(noted)

    def _passed_over(self, noted: Noted) -> None:
        """No step came. Gradients that stay would be lost to a run that resumes here."""
        self._steps.end(noted.iteration)
        if self._lacks_step(noted) and not self._accumulated:
            self._accumulated = True
            _log.warning(
                "iteration %d: a backward without optimizer.step() or zero_grad(). To accumulate gradients, "
                "use ddp.no_sync(): a run resumed between two such backwards lacks what was accumulated",
                noted.iteration,
            )

    def _lacks_step(self, noted: Noted) -> bool:
        """Whether gradients wait for a step that hasn't come."""
        waiting = not noted.stepped and not noted.infinite
        return waiting and any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)


def _state_of(thing: Any) -> dict[str, Any] | None:
    """A scheduler's or scaler's state as it is now."""
    return None if thing is None else copy.deepcopy(thing.state_dict())
