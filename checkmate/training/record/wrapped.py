"""Follows a script's clipping, GradScaler and learning rate scheduler, which do not have hooks.

Of a GradScaler: the factor by which it unscales gradients, and whether it lets the optimizer step. Of a
scheduler: its class and its steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState

from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.attached import AttachedData, attach, attached, detach
from checkmate.training.errors import RefusedError

# Held outside this module's own names, where `clipping_followed` would find them.
_TORCHS: Final[Any] = SimpleNamespace(
    clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
    clip_grads_with_norm_=getattr(torch.nn.utils, "clip_grads_with_norm_", None),  # since PyTorch 2.6
)

OnMultiplied = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Called with the parameters whose gradients were multiplied, and with the factor."""


class ClipListener(AttachedData):
    """Attached to parameters until `close`. `before` is called before each clipping, `noted` after it."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], before: Callable[[], None], draft: OnMultiplied
    ) -> None:
        self.before = before
        self.noted = draft
        self._parameters = parameters
        for parameter in parameters:
            attach(parameter, self)

    def close(self) -> None:
        """Detach from the parameters."""
        for parameter in self._parameters:
            detach(parameter, self)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients with `torch.nn.utils.clip_grad_norm_`, and note the coefficient in the step record.

    The result is the same, bit for bit. Without `checkmate.protect` this is torch's function alone. After it,
    torch's name is this function's, too.

    Args:
        parameters: The parameters whose gradients are clipped, together.
        max_norm: The largest total norm.
        norm_type: The order of the norm; `inf` for the maximum norm.
        error_if_nonfinite: Raise an error if the total norm is not finite.
        foreach: Use torch's foreach implementation; by default torch decides.

    Returns:
        The total norm of the gradients before clipping: a scalar tensor, and a DTensor for a sharded model.

    Raises:
        RefusedError: A gradient was changed since its reduction in a way that shadow nodes can't repeat.
        RuntimeError: The total norm is not finite, with `error_if_nonfinite`.
    """
    clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    listeners = _before_clipping(clipped)
    norm: torch.Tensor = _TORCHS.clip_grad_norm_(clipped, max_norm, norm_type, error_if_nonfinite, foreach)
    _note_clipping(listeners, clipped, max_norm, norm)
    return norm


def clip_grads_with_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Clip with `torch.nn.utils.clip_grads_with_norm_`, and note the coefficient in the step record.

    It is for scripts that combine norms themselves, for example those of pipeline stages. It needs PyTorch
    2.6. The result is the same as torch's, bit for bit. Without `checkmate.protect` this is torch's function
    alone. After it, torch's name is this function's, too.

    Args:
        parameters: The parameters whose gradients are clipped, together.
        max_norm: The largest total norm.
        total_norm: The total norm of the gradients: a scalar tensor, the same on all ranks.
        foreach: Use torch's foreach implementation; by default torch decides.

    Raises:
        RefusedError: A gradient was changed since its reduction in a way that shadow nodes can't repeat.
    """
    clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    listeners = _before_clipping(clipped)
    _TORCHS.clip_grads_with_norm_(clipped, max_norm, total_norm, foreach)
    _note_clipping(listeners, clipped, max_norm, total_norm)


@contextmanager
def clipping_followed() -> Iterator[None]:
    """Have torch's clipping functions be Checkmate's under each name that a module has for them.

    A script or a framework may have imported them before. What holds them otherwise, e.g. an attribute of an
    object, calls torch's own, and the next step is refused if that clips. Nor can such an attribute be
    pickled meanwhile, because pickle finds another function under its name.
    """
    replacements = {
        id(getattr(_TORCHS, function.__name__)): function
        for function in (clip_grad_norm_, clip_grads_with_norm_)
    }
    replacements.pop(id(None), None)
    replaced = []
    try:
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                # By torch's private names, one of its functions calls the other, which would be noted twice.
                if id(value) in replacements and not (
                    module is torch.nn.utils.clip_grad and name.startswith("_")
                ):
                    setattr(module, name, replacements[id(value)])
                    replaced.append((module, name, value))
        yield
    finally:
        for module, name, value in replaced:
            if getattr(module, name, None) is replacements[id(value)]:
                setattr(module, name, value)


def _before_clipping(parameters: Sequence[torch.Tensor]) -> list[ClipListener]:
    """Return the listeners of parameters, once each, after they have checked the gradients."""
    listeners = {id(listener): listener for p in parameters if (listener := attached(p, ClipListener))}
    for listener in listeners.values():
        listener.before()
    return list(listeners.values())


def _note_clipping(
    listeners: Sequence[ClipListener],
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    norm: torch.Tensor,
) -> None:
    """Tell listeners the coefficient that torch has used."""
    if not listeners or all(p.grad is None for p in parameters):
        return
    # torch's own expression: its functions do not return the coefficient
    coefficient = _whole(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
    for listener in listeners:
        listener.noted(parameters, coefficient)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of a DTensor, on all ranks of its mesh."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


class ScalerListener(Protocol):
    """The calls that a followed scaler causes."""

    def check_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        """Check another optimizer that the scaler is about to have step, or skip."""

    def check_gradients(self) -> None:
        """Check gradients before they are unscaled."""

    def scaled(self, kind: pb.Scaling.Kind.ValueType, factor: torch.Tensor) -> None:
        """Note that gradients were unscaled."""

    def scaler_stepped(self, infinite: Sequence[torch.Tensor]) -> None:
        """Note that `step` has returned; it found an infinity if one of these is not zero."""

    def moved_on(self) -> None:
        """Note that `update` has returned."""


class ScalerWatch:
    """Wraps `unscale_`, `step` and `update` of one GradScaler, because GradScaler does not have hooks."""

    def __init__(self, scaler: Any, optimizer: torch.optim.Optimizer, listener: ScalerListener) -> None:
        self._scaler = scaler
        self._optimizer = optimizer
        self._listener = listener
        self._unscale, self._step, self._update = scaler.unscale_, scaler.step, scaler.update
        self._unscaled = False
        scaler.unscale_, scaler.step, scaler.update = self.unscale_, self.step, self.update

    def remove(self) -> None:
        """Restore the scaler's own methods."""
        del self._scaler.unscale_, self._scaler.step, self._scaler.update

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `GradScaler.unscale_` and note it."""
        if optimizer is not self._optimizer or not self._scaler.is_enabled():
            self._unscale(optimizer)
            return
        self._listener.check_gradients()
        factor = self._scaler._scale.double().reciprocal().float()  # as GradScaler computes it
        self._unscale(optimizer)
        self._unscaled = True
        self._listener.scaled(pb.Scaling.UNSCALE, factor)

    def step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        """Call `GradScaler.step` and note it. A fused optimizer unscales and skips by itself."""
        if optimizer is not self._optimizer or not self._scaler.is_enabled():
            self._listener.check_foreign(optimizer)  # its own hook says nothing if the scaler skips it
            return self._step(optimizer, *arguments, **keywords)
        # From the scaler, because a script may unscale and then not step.
        self._unscaled = self._scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        scale = self._scaler._scale.clone()
        result = self._step(optimizer, *arguments, **keywords)
        if not self._unscaled:
            self._listener.scaled(pb.Scaling.FUSED, scale)
        infinities = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        # Cloned because update() adds other optimizers' findings to the first of these.
        self._listener.scaler_stepped([infinity.clone() for infinity in infinities.values()])
        return result

    def update(self, *arguments: Any, **keywords: Any) -> None:
        """Call `GradScaler.update` and note it."""
        self._update(*arguments, **keywords)
        self._listener.moved_on()


def class_of(scheduler: Any) -> str:
    """Return a name such as `StepLR` or `SequentialLR(LinearLR, StepLR)`; empty for `None`."""
    if scheduler is None:
        return ""
    within = ", ".join(class_of(part) for part in getattr(scheduler, "_schedulers", ()))
    return f"{type(scheduler).__name__}({within})" if within else type(scheduler).__name__


NOT_GIVEN: Final = (
    "the optimizer has a learning rate scheduler that was not given, so a resumed run would begin its "
    "schedule again: make it before checkmate.restore(model, optimizer, scheduler=scheduler), and give it to "
    "checkmate.protect in the same way"
)
"""The reason for the refusal of a script with a scheduler of its own."""


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has had a scheduler: PyTorch marks it, since 2.4 by the first of these."""
    return any(hasattr(optimizer.step, mark) for mark in ("_wrapped_by_lr_sched", "_with_counter"))


class SeveralSchedulers:
    """Schedulers of several optimizers, whose state is kept as that of one."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = list(schedulers)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all, in their order."""
        return {"_schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: Any) -> None:
        """Load a `state_dict`. Raise `ValueError` if it has another number of schedulers."""
        for scheduler, scheduler_state in zip(self._schedulers, state["_schedulers"], strict=True):
            scheduler.load_state_dict(scheduler_state)


def schedulers_of(scheduler: Any) -> list[Any]:
    """Return the schedulers that a script steps."""
    if isinstance(scheduler, SeveralSchedulers):
        return scheduler._schedulers
    return [] if scheduler is None else [scheduler]


class SchedulerWatch:
    """Gives one scheduler a subclass whose `step` calls `on_step`, because schedulers do not have hooks.

    An attribute `step` would appear in the scheduler's `state_dict()`.
    """

    def __init__(self, scheduler: Any, on_step: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._kind = type(scheduler)
        kind: Any = self._kind

        def step(itself: Any, *arguments: Any, **keywords: Any) -> Any:
            result = kind.step(itself, *arguments, **keywords)
            if itself is scheduler:
                on_step()
            return result

        def reduce(itself: Any, protocol: Any) -> Any:
            """Give copies and pickles the original class."""
            _, _, *rest = kind.__reduce_ex__(itself, protocol)
            return object.__new__, (kind,), *rest

        alike = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        followed = type(kind.__name__, (kind,), {**alike, "step": step, "__reduce_ex__": reduce})
        try:
            scheduler.__class__ = followed
        except TypeError as error:  # it has slots, or is implemented in C
            raise RefusedError(f"scheduler= is a {kind.__name__}, which can't be followed: {error}") from None

    def remove(self) -> None:
        """Restore the scheduler's own class."""
        self._scheduler.__class__ = self._kind


_SCALER_FRAMES: Final = 12
"""The number of frames above a step in which its scaler's own is, with a library's between them."""


def check_unscheduled(optimizer: torch.optim.Optimizer) -> None:
    """Raise `RefusedError` if an optimizer has had a scheduler, although none was given."""
    if is_scheduled(optimizer):
        raise RefusedError(NOT_GIVEN)


def check_unscaled(optimizer: torch.optim.Optimizer) -> None:
    """Raise `RefusedError` if a GradScaler has called the optimizer's step, although none is followed.

    A scaler that changes gradients is noticed by them; a fused optimizer gets the scale instead, and a scale
    of 1 changes nothing.
    """
    frame = sys._getframe(1)
    for _ in range(_SCALER_FRAMES):
        if frame.f_code in _SCALER_STEPS and frame.f_locals["self"].is_enabled():
            raise RefusedError(
                f"a GradScaler steps the {type(optimizer).__name__}, but was not given, so a resumed run "
                "would begin with its first scale: pass scaler= to checkmate.restore and checkmate.protect"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


_SCALER_STEPS: Final = {GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__}
