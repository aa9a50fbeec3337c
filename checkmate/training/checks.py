"""Checks of `checkmate.protect` before training begins, for scripts that shadow nodes can't follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from checkmate import state
from checkmate.optim.supported import UnsupportedOptimizer
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.errors import RefusedError
from checkmate.training.gradients.hook import GradientHook
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.capture import Watched
from checkmate.wording import counted


class Scheduler(Protocol):
    """Any learning rate scheduler, such as torch's."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class Scaler(Protocol):
    """Any gradient scaler, such as torch's GradScaler."""

    def unscale_(self, optimizer: Any, /) -> Any: ...
    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def update(self, *args: Any, **kwargs: Any) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


_SCHEDULER: Final = ("step", "state_dict", "load_state_dict")
_SCALER: Final = ("unscale_", "step", "update", "state_dict", "load_state_dict")


def check_script(watched: Watched) -> None:
    """Raise `RefusedError` if `scheduler=` or `scaler=` is something else."""
    if isinstance(watched.scheduler, list | tuple):
        raise RefusedError(
            f"scheduler= is a {type(watched.scheduler).__name__}: pass one scheduler. Combine several with "
            "SequentialLR(optimizer, [first, second], milestones=[...]) if they follow one another, or with "
            "ChainedScheduler([first, second]) if they act together"
        )
    for name, thing, methods in (
        ("scheduler", watched.scheduler, _SCHEDULER),
        ("scaler", watched.scaler, _SCALER),
    ):
        if isinstance(thing, type):
            raise RefusedError(f"{name}= is the class {thing.__name__}: pass an instance of it")
        lacking = [f"{method}()" for method in methods if not callable(getattr(thing, method, None))]
        if thing is not None and lacking:
            raise RefusedError(f"{name}= is a {type(thing).__name__}, which has no {', '.join(lacking)}")


def check_model(watched: Watched) -> None:
    """Raise `RefusedError` if the model has another hook, or can't be followed with its scaler."""
    if isinstance(watched.model, DdpModel):
        check_ddp(watched.model)
        return
    from checkmate.training.gradients.sharded_hooks import check_hooks  # noqa: PLC0415 - imports FSDP
    from checkmate.training.model.fsdp import FsdpModel  # noqa: PLC0415

    assert isinstance(watched.model, FsdpModel)
    check_hooks(watched.model)
    if watched.scaler is not None and watched.scaler.is_enabled():
        raise RefusedError(
            "scaler= is not supported with a sharded model, because ranks would skip steps separately: use "
            "bfloat16, which needs none"
        )


def check_ddp(model: DdpModel) -> None:
    """Raise `RefusedError` if DDP has another hook, or if not all ranks train in each iteration."""
    hook = model.ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    if hook == GradientHook.run.__qualname__:
        raise RefusedError(
            "this DistributedDataParallel was protected before and keeps its communication hook: wrap the "
            "model in a new one"
        )
    if hook:
        raise RefusedError(
            f"DDP already has the communication hook {hook} and accepts only one. Checkmate's own hook "
            "reduces gradients as they are: remove the other one"
        )
    model.check_forward()


def check_kept(watched: Watched) -> None:
    """Raise `StateError` if some state can't be stored."""
    for name, give in (
        ("scheduler", None if watched.scheduler is None else watched.scheduler.state_dict),
        ("scaler", None if watched.scaler is None else watched.scaler.state_dict),
        ("extra", watched.extra),
    ):
        if give is not None:
            try:
                state.dumps(give())
            except state.StateError as error:
                raise state.StateError(f"{name}: {error}") from None
    for name, tensor in watched.model.kept_beside().items():
        _check_tensor(name, tensor)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise `StateError` if step records can't hold a buffer of this kind."""
    kind = "" if tensor.layout is torch.strided else str(tensor.layout)
    kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else kind
    if not kind:
        try:
            state.dumps(state.local_of(tensor).detach().reshape(-1)[:0].clone())
        except state.StateError:
            kind = type(tensor).__name__
    if kind:
        raise state.StateError(
            f"{name}, a buffer or frozen parameter, can't be kept because it is {kind}: shadow nodes keep "
            "plain dense tensors; store it in another attribute of the module, and create it in the script"
        )


def check_all_stepped(spec: pb.OptimizerSpec, names: Sequence[str]) -> None:
    """Raise `UnsupportedOptimizer` if the optimizer lacks a parameter that the model trains."""
    stepped = {number for group in spec.groups for number in group.parameters}
    left = [name for number, name in enumerate(names) if number not in stepped]
    if left:
        others = f" and {counted(len(left) - 1, 'other')}" if len(left) > 1 else ""
        raise UnsupportedOptimizer(
            f"the optimizer lacks {left[0]}{others}, which the model trains: add the rest to a parameter "
            "group, or set requires_grad=False; a protected model has one optimizer"
        )
