"""Checks of `checkmate.protect` before training begins, for scripts that shadow nodes can't follow."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Protocol, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from checkmate import state
from checkmate.base.wording import counted, with_article
from checkmate.optim.several import OwnedShare, SeveralOptimizers, scripts_optimizers
from checkmate.optim.supported import UnsupportedOptimizer
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.errors import RefusedError
from checkmate.training.gradients.ddp_hook import GradientHook
from checkmate.training.model.ddp import DdpModel, ShareModel
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.capture import Watched
from checkmate.training.record.wrapped import NOT_GIVEN, SeveralSchedulers, is_scheduled, schedulers_of

_log: Final = logging.getLogger("checkmate")


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


_COMBINE: Final = (
    "combine several with SequentialLR(optimizer, [first, second], milestones=[...]) if they follow one "
    "another, or with ChainedScheduler([first, second]) if they act together"
)
_SCHEDULER: Final = ("step", "state_dict", "load_state_dict")
_SCALER: Final = ("unscale_", "step", "update", "state_dict", "load_state_dict")


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Schedulers = Scheduler | Sequence[Scheduler]


def watched_of(
    model: TrainedModel,
    optimizer: Optimizers,
    scheduler: Schedulers | None,
    scaler: Scaler | None,
    extra: Callable[[], Any] | None = None,
) -> Watched:
    """Return the objects of a script, several optimizers and their schedulers as one.

    Raise `RefusedError` if `optimizer=`, `scheduler=` or `scaler=` is something else, optimizers share a
    parameter, or one has a scheduler that was not given.
    """
    if not isinstance(optimizer, list | tuple):
        alone = cast(torch.optim.Optimizer, optimizer)
        if isinstance(model, ShareModel):
            alone = OwnedShare(optimizer)
        watched = Watched(model, alone, scheduler, scaler, extra)
        check_script(watched)
        return watched
    _check_several(optimizer, scaler)
    schedulers = (
        scheduler if isinstance(scheduler, list | tuple) else [] if scheduler is None else [scheduler]
    )
    together = SeveralSchedulers(schedulers) if schedulers else None
    watched = Watched(model, SeveralOptimizers(optimizer), together, scaler, extra)
    check_script(watched)
    return watched


def _check_several(optimizers: Sequence[Any], scaler: Any) -> None:
    """Raise `RefusedError` unless these are optimizers, each of parameters of its own."""
    if not optimizers or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise RefusedError(f"optimizer= is a list of {kinds or 'nothing'}: pass an optimizer, or several")
    if scaler is not None and getattr(scaler, "is_enabled", bool)():
        raise RefusedError(
            "a GradScaler can't be followed with several optimizers: use bfloat16, which needs none"
        )
    of = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    if sum(map(len, of)) > len(set().union(*of)):
        raise RefusedError("a parameter is in several optimizers, but each must step parameters of its own")


def check_script(watched: Watched) -> None:
    """Raise `RefusedError` if `scheduler=` or `scaler=` is something else, or a scheduler was not given."""
    if isinstance(watched.scheduler, list | tuple):
        raise RefusedError(
            f"scheduler= is a {type(watched.scheduler).__name__}: pass one scheduler for one optimizer, and "
            f"{_COMBINE}"
        )
    schedulers = [("scheduler", scheduler, _SCHEDULER) for scheduler in schedulers_of(watched.scheduler)]
    for name, thing, methods in (*schedulers, ("scaler", watched.scaler, _SCALER)):
        if isinstance(thing, type):
            raise RefusedError(f"{name}= is the class {thing.__name__}: pass an instance of it")
        lacking = [f"{method}()" for method in methods if not callable(getattr(thing, method, None))]
        if thing is not None and lacking:
            raise RefusedError(f"{name}= is a {type(thing).__name__}, which has no {', '.join(lacking)}")


def check_schedulers(watched: Watched) -> None:
    """Raise `RefusedError` if a scheduler was not given; warn if the script may keep it through `extra()`."""
    try:
        for optimizer in scripts_optimizers(watched.optimizer):
            _check_schedulers(optimizer, schedulers_of(watched.scheduler))
    except RefusedError as error:
        if watched.extra is None:
            raise
        _log.warning("%s, unless extra() has its state", error)


def _check_schedulers(optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
    """Raise `RefusedError` if an optimizer has a scheduler that is not one of these, or a part of one."""
    if not is_scheduled(optimizer):
        return
    known_parts = {id(part): part for scheduler in schedulers for part in _parts(scheduler)}
    strangers = _other_schedulers(optimizer, known_parts)
    if strangers:
        gc.collect()  # one that the script has dropped may be left in a cycle
        strangers = _other_schedulers(optimizer, known_parts)
    if strangers and not schedulers:
        raise RefusedError(NOT_GIVEN)
    if strangers:
        raise RefusedError(
            f"the optimizer has {with_article(strangers[0])} beside scheduler=, {_COMBINE}, and "
            "pass the result"
        )


def _other_schedulers(optimizer: torch.optim.Optimizer, known_parts: Collection[int]) -> list[str]:
    """Return the classes of an optimizer's schedulers whose ids are not among those given."""
    owners = gc.get_referrers(optimizer)
    for values in [owner for owner in owners if type(owner) is dict and owner.get("optimizer") is optimizer]:
        owners += gc.get_referrers(values)  # whose attributes they are, once something has asked for these
    return [
        type(owner).__name__
        for owner in owners
        if isinstance(owner, LRScheduler) and id(owner) not in known_parts
    ]


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and those that it combines or wraps."""
    yield scheduler
    for value in vars(scheduler).values() if hasattr(scheduler, "__dict__") else ():
        for part in value if isinstance(value, list | tuple) else [value]:
            if all(callable(getattr(part, name, None)) for name in _SCHEDULER) and part is not scheduler:
                yield from _parts(part) if not isinstance(part, torch.optim.Optimizer) else ()


def check_model(watched: Watched, copies: str = "switch") -> None:
    """Raise `RefusedError` if the model can't be followed, or not with its scaler, or not by these copies."""
    for name, module in watched.model.inner.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RefusedError(
                f"{name or type(module).__name__} has sparse=True, and sparse gradients can't be copied: "
                "make it with sparse=False"
            )
    if isinstance(watched.model, DdpModel):
        check_ddp(watched.model, copies)
        return
    if copies == "switch":
        from checkmate.training.gradients.fsdp_hooks import check_hooks  # noqa: PLC0415 - imports FSDP
        from checkmate.training.model.fsdp import FsdpReplica  # noqa: PLC0415

        assert isinstance(watched.model, FsdpReplica)
        check_hooks(watched.model)
        if watched.scaler is not None and watched.scaler.is_enabled():
            raise RefusedError(
                "scaler= is not supported with a sharded model, because ranks would skip steps separately: "
                "use bfloat16, which needs none, or have hosts copy gradients, copies: host"
            )


def check_ddp(model: DdpModel, copies: str = "switch") -> None:
    """Raise `RefusedError` if DDP does not reduce all parameters, or not all ranks train in each iteration.

    With copies by switch, also if it has another communication hook.
    """
    hook = model.ddp._get_ddp_logging_data().get("comm_hook") if copies == "switch" else None  # type: ignore[no-untyped-call]
    if hook == GradientHook.run.__qualname__:
        raise RefusedError(
            "this DistributedDataParallel was protected before and keeps its communication hook: wrap the "
            "model in a new one"
        )
    if hook:
        raise RefusedError(
            f"DDP already has the communication hook {hook} and accepts only one. Checkmate's own hook "
            "reduces gradients as they are: remove the other one, or have hosts copy them, copies: host"
        )
    model.check_forward()
    # A bucket with a parameter that DDP does not reduce would never be complete.
    reduced = int(model.ddp._get_ddp_logging_data()["num_parameter_tensors"])  # type: ignore[no-untyped-call]
    parameters = model.inner.named_parameters()
    trained = sum(p.requires_grad and name not in model.ignored for name, p in parameters)
    if reduced != trained:
        raise RefusedError(
            f"{trained} parameters need gradients, but {reduced} did when "
            "DistributedDataParallel was constructed, which reduces those: set requires_grad before that"
        )


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
    for name, module in watched.model.inner.named_modules():
        kind = type(module)
        gives = kind.get_extra_state is not nn.Module.get_extra_state
        if gives and kind.set_extra_state is nn.Module.set_extra_state:
            raise state.StateError(
                f"{name or kind.__name__} has get_extra_state(), but not set_extra_state(), so what it "
                f"returns can't be restored: give {kind.__name__} both"
            )


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
    stepping_numbers = {number for group in spec.groups for number in group.parameters}
    missing = [name for number, name in enumerate(names) if number not in stepping_numbers]
    if missing:
        more = f" and {counted(len(missing) - 1, 'other')}" if len(missing) > 1 else ""
        raise UnsupportedOptimizer(
            f"the optimizer lacks {missing[0]}{more}, which the model trains: add the rest to a parameter "
            "group, pass the other optimizer, too, checkmate.protect(model, [first, second]), or set "
            "requires_grad=False"
        )
