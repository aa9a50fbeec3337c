"""Checks that stored state fits the script and job that resume from it, and installs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from checkmate import state
from checkmate.base.wording import counted, with_article
from checkmate.nodes.other_ranks import BY_DISK, OtherRanks
from checkmate.optim.several import entries_of
from checkmate.optim.supported import FROZEN, apply_options, kind_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import in_memory_order, sharded_like
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.capture import Watched
from checkmate.training.record.copied_state import CopiedState, placed_like
from checkmate.training.record.generators import install_generators
from checkmate.training.record.wrapped import class_of
from checkmate.training.start.places import Place
from checkmate.wire.parameter import LayoutError, Parameter, dim_order

States = Mapping[int, tuple[torch.Tensor, Mapping[str, object]]]
"""Parameters and their optimizer state, by number, with the shapes of the script's own parameters."""


_AFTER: Final = "To continue with another one, create it after restore, and pass it to checkmate.protect"
_AS_IT_WAS: Final = f"construct it as before. {_AFTER}"


class InstallError(RuntimeError):
    """State that doesn't fit this script's model, optimizer or scheduler."""


def check_optimizer(saved_spec: pb.OptimizerSpec, script_spec: pb.OptimizerSpec) -> None:
    """Raise `InstallError` if the state is of another kind of optimizer, or of other parameter groups."""
    kinds = [[kind_of(spec, group) for group in spec.groups] for spec in (saved_spec, script_spec)]
    kind_names = [" and ".join(dict.fromkeys(names)) for names in kinds]
    if kind_names[0] != kind_names[1]:
        raise InstallError(
            f"the state is of {kind_names[0]}, but the script has {kind_names[1]}: "
            "construct the optimizer as before"
        )
    saved_groups, present_groups = (
        [list(group.parameters) for group in spec.groups] for spec in (saved_spec, script_spec)
    )
    if (saved_groups, kinds[0]) != (present_groups, kinds[1]):
        sizes = [", ".join(str(len(group)) for group in groups) for groups in (saved_groups, present_groups)]
        raise InstallError(
            f"the state's parameter groups have {sizes[0]} parameters, the script's {sizes[1]}, or different "
            "ones: construct the optimizer as before"
        )


def check_record(record: pb.IterationRecord, watched: Watched, place: Place) -> None:
    """Raise `InstallError` if a record's scheduler or scaler is not like the script's.

    Raise `OtherRanks` if it is of another number of ranks. A record without parts, from before the first
    iteration, fits anything.
    """
    if not record.parts:
        return
    if len(record.parts) != place.ranks:
        raise OtherRanks(
            f"the state has {counted(len(record.parts), 'rank')} in DP group {place.group}, but the job now "
            f"has {place.ranks}. {BY_DISK}"
        )
    step = part_of(record, 0).step
    scheduler, scaler = (state.loads(data) if data else None for data in (step.scheduler, step.scaler))
    check_scheduler(watched.scheduler, scheduler, step.scheduler_class)
    check_scaler(watched.scaler, scaler)


def check_scheduler(scheduler: Any, saved_state: Mapping[str, Any] | None, saved_class: str = "") -> None:
    """Raise `InstallError` if the script's scheduler is of another kind than the stored one.

    `saved_class` is `class_of` the stored one. If the classes are equal, either state may have additional
    keys, because some schedulers add keys as they step. If the class is unknown, all keys must be equal.
    """
    class_name = class_of(scheduler)
    if saved_state is None:
        if scheduler is None:
            return
        raise InstallError(
            f"the state has no scheduler, but the script has {with_article(class_name)}, which would "
            f"begin in the middle of the run. {_AFTER}"
        )
    if scheduler is None:
        kind = f", {with_article(saved_class)}" if saved_class else ""
        raise InstallError(f"the state has a scheduler{kind}: pass scheduler= to checkmate.restore")
    if saved_class and saved_class != class_name:
        raise InstallError(
            f"the state's scheduler is {with_article(saved_class)}, but the script's is "
            f"{with_article(class_name)}: {_AS_IT_WAS}"
        )
    saved_keys, present_keys = set(_keys(saved_state)), set(_keys(scheduler.state_dict()))
    fits = (
        saved_keys <= present_keys or present_keys <= saved_keys
        if saved_class
        else saved_keys == present_keys
    )
    if not fits:
        raise InstallError(
            f"the state's {saved_class or 'scheduler'} has {_enumerated(saved_keys - present_keys)}, and the "
            f"script's {class_name} has {_enumerated(present_keys - saved_keys)}: {_AS_IT_WAS}"
        )


def check_scaler(scaler: Any, saved_state: Mapping[str, Any] | None) -> None:
    """Raise `InstallError` if only one of the scalers is enabled; a disabled one has an empty state."""
    present = None if scaler is None else scaler.state_dict()
    if saved_state and not present:
        raise InstallError("the state has an enabled scaler: pass an enabled scaler= to checkmate.restore")
    if present and not saved_state:
        raise InstallError(f"the state has no enabled scaler, but the script has one: {_AS_IT_WAS}")
    if present and saved_state and present.keys() != saved_state.keys():
        raise InstallError(
            f"the state's scaler has {_enumerated(saved_state.keys() - present.keys())}, and the script's "
            f"{type(scaler).__name__} has {_enumerated(present.keys() - saved_state.keys())}: {_AS_IT_WAS}"
        )


def _keys(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a scheduler's state, and of the schedulers in it."""
    for key, value in state.items():
        yield key
        if key == "_schedulers":
            for number, part in enumerate(value):
                yield from (f"{key}[{number}].{name}" for name in _keys(part))


def _enumerated(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "no other keys"


def install_parameters(parameters: Sequence[nn.Parameter], states: States) -> None:
    """Set parameters in place, bit for bit."""
    with torch.no_grad():
        for number, (tensor, _) in states.items():
            state.local_of(parameters[number]).copy_(tensor)


def install_gradients(parameters: Sequence[nn.Parameter], numbers: Collection[int]) -> None:
    """Give parameters zeros as gradients, as they had at the iteration's end, and the others none."""
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.zeros_like(parameter) if number in numbers else None


def install_optimizer(
    optimizer: torch.optim.Optimizer,
    numbers: Mapping[nn.Parameter, int],
    states: States,
    options: Sequence[str],
    record: pb.IterationRecord,
) -> None:
    """Set the optimizer's state and each group's options.

    Args:
        optimizer: The script's optimizer.
        numbers: Trained parameters' numbers in the layout.
        states: State of the trained parameters.
        options: The options of each group; empty to keep them.
        record: Contains the state of parameters whose gradients are not reduced.
    """
    whole = optimizer.state_dict()
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    trained = {
        index: dict(states[number][1])
        for index, parameter in enumerate(flat)
        if (number := numbers.get(parameter, FROZEN)) in states and states[number][1]
    }
    whole["state"] = dict(sorted({**trained, **_frozen_states(record)}.items()))
    load_optimizer(optimizer, whole)
    install_options(optimizer, options)


def _frozen_states(record: pb.IterationRecord) -> dict[int, dict[str, object]]:
    """Return the optimizer's state of parameters whose gradients are not reduced, by their numbers in it."""
    frozen = {name: state.loads(data) for name, data in record.buffers.items() if state.is_frozen_state(name)}
    return state.frozen_states(frozen)


def install_options(optimizer: torch.optim.Optimizer, options: Sequence[str]) -> None:
    """Set each group's options; none are given to keep them."""
    for group, text in zip(optimizer.param_groups, options, strict=bool(options)):
        apply_options(group, text)


def install_copied(
    copied: CopiedState,
    tensors: Mapping[int, torch.Tensor],
    record: pb.IterationRecord,
    position: int,
    next_iteration: int,
) -> None:
    """Set parameters and copied optimizer state; before the first iteration the script's is as it was.

    Raise `InstallError` if the script's optimizer does not create such state.
    """
    if not next_iteration:
        copied.install_parameters(tensors)
        return
    try:
        data = part_of(record, position if copied.is_told_by(position) else 0).beside
        copied.install(tensors, state.loads(data) if data else {})
    except state.StateError as error:
        raise InstallError(str(error)) from None


def install_frozen(optimizer: torch.optim.Optimizer, record: pb.IterationRecord) -> None:
    """Set an optimizer's state of parameters whose gradients are not reduced, where all else is copied."""
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entries in _frozen_states(record).items():
        put_entries(optimizer, flat[number], entries)


def put_entries(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, entries: Mapping[str, object]
) -> None:
    """Set entries of a parameter's state, where the parameter is."""
    present = entries_of(optimizer, parameter)
    present.update({name: placed_like(parameter, value) for name, value in entries.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
    """Call `load_state_dict`, then correct types and memory formats to those that the optimizer would create.

    `load_state_dict` casts state to its parameter's type (NAdam's products, for example), and keeps strides.
    """
    optimizer.load_state_dict(whole)
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in whole["state"].items():
        present = optimizer.state[flat[index]]
        for name, value in entries.items():
            present_tensor = present.get(name)
            if (
                isinstance(value, torch.Tensor)
                and present_tensor is not None
                and present_tensor.dtype != value.dtype
            ):
                present[name] = value.to(present_tensor.device)
            present[name] = sharded_like(flat[index], present[name])
    lay_out_state(optimizer)


def install_buffers(model: TrainedModel, buffers: Mapping[str, torch.Tensor]) -> None:
    """Set buffers and frozen parameters, by name. A buffer of another shape or type is replaced."""
    tensors = model.tensors()
    with torch.no_grad():
        for name, tensor in buffers.items():
            present_tensor = tensors.get(name)
            if state.is_frozen_state(name):
                continue  # the optimizer's
            if state.is_extra_state(name):
                _install_extra(model, name, tensor)
                continue
            if present_tensor is None:
                _fill(model, name, tensor)
                continue
            local = state.local_of(present_tensor)
            if (local.shape, local.dtype) == (tensor.shape, tensor.dtype):
                local.copy_(tensor)
            else:
                present_tensor.data = tensor.to(present_tensor.device)


def _fill(model: TrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Set a buffer that is `None` before the first forward. Raise `InstallError` if there is none."""
    path, _, key = name.rpartition(".")
    module = dict(model.inner.named_modules()).get(path)
    if module is None or key not in module._buffers:
        raise InstallError(f"the state has a buffer {name}, which the model lacks")
    device = next(iter(model.parameters().values())).device
    module._buffers[key] = tensor.to(device, copy=True)


def _install_extra(model: TrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Give a module its extra state. Raise `InstallError` if the model lacks the module."""
    module = dict(model.inner.named_modules()).get(name.rpartition(".")[0])
    if module is None:
        raise InstallError(f"the state has {name}, but the model has no such module")
    module.set_extra_state(state.unpacked(tensor))


def install_record(watched: Watched, record: pb.IterationRecord, position: int) -> Any:
    """Install a record's buffers, scheduler, scaler and this rank's random generators.

    A record without parts (before the first iteration) changes nothing.

    Returns:
        This rank's `extra`, or `None`.
    """
    part, step = part_of(record, position), part_of(record, 0).step
    buffers = {name: state.loads(data) for name, data in record.buffers.items()}
    install_buffers(watched.model, buffers | own_buffers(record, position))
    _load(watched.scheduler, "scheduler", step.scheduler)
    _load(watched.scaler, "scaler", step.scaler)
    if part.rng:
        install_generators(state.load_generators(part.rng))
    return state.loads(part.extra) if part.extra else None


def _load(thing: Any, name: str, data: bytes) -> None:
    """Load the state of a scheduler or scaler. `check_optimizer` can't predict all failures."""
    if thing is None or not data:
        return
    try:
        thing.load_state_dict(state.loads(data))
    except Exception as error:
        raise InstallError(
            f"the {name}'s state doesn't fit the script's {type(thing).__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error


def own_buffers(record: pb.IterationRecord, position: int) -> dict[str, torch.Tensor]:
    """Return the buffers in a rank's part."""
    data = part_of(record, position).buffers
    return state.loads(data) if data else {}


def part_of(record: pb.IterationRecord, position: int) -> pb.RecordPart:
    """Return a rank's part, which is empty if the record lacks it."""
    return next((part for part in record.parts if part.position == position), pb.RecordPart())


def restored_parts(record: pb.IterationRecord) -> str:
    """Return in words what beside parameters and optimizer a record restores, and what it lacks."""
    first_part = part_of(record, 0)
    state_names = [name for name in record.buffers if not state.is_frozen_state(name)]
    names = [name for name in state_names if not state.is_extra_state(name)]
    extra = len(state_names) - len(names)
    parts = {
        "random generators": first_part.rng,
        counted(len(names), "buffer or frozen parameter", "buffers and frozen parameters"): names,
        f"extra state of {counted(extra, 'module')}": extra,
        "scheduler": first_part.step.scheduler,
        "scaler": first_part.step.scaler,
        "extra()": any(part.extra for part in record.parts),
    }
    contents = ["parameters", "optimizer", *(name for name, content in parts.items() if content)]
    # Without parts it is of before the first iteration, when there is nothing to restore yet.
    optional = ("scheduler", "scaler", "extra()") if record.parts else ()
    lacking = [f"no {name}" for name in optional if not parts[name]]
    return f"with {', '.join(contents)}" + (f"; {', '.join(lacking)}" if lacking else "")


def check_format(parameter: Parameter, reduced: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Raise `RuntimeError` if DDP's bucket or `.grad` has another memory format than the parameter.

    Args:
        parameter: The parameter.
        reduced: Its flat part of DDP's bucket before the reduction: the elements of `gradient`.
        gradient: Its `.grad`.
    """
    if gradient is None or len(parameter.shape) < 2:
        return
    if _order(gradient) == parameter.dim_order:
        local = in_memory_order(gradient.detach(), parameter.dim_order).reshape(-1)
        if torch.equal(local, reduced) or not torch.equal(local.sort()[0], reduced.sort()[0]):
            return  # with other elements it is not of this backward: the parameter was not used
    raise RuntimeError(
        f"the gradient of {parameter.name} has another memory format than the parameter: choose memory "
        "formats before DistributedDataParallel is constructed, and let backward create .grad by leaving it "
        "None"
    )


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give optimizer state the memory format of its parameter, as the optimizer itself would.

    State that a script has loaded may have another one. Then steps give other bits, and torch's fused
    implementations wrong values.
    """
    for parameter, entries in optimizer.state.items():
        entries.update({name: _laid_out(parameter, value) for name, value in entries.items()})


def _laid_out(parameter: torch.Tensor, value: object) -> object:
    """Return an entry of a parameter's state, in its memory format if it has the parameter's shape."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if _order(value) == _order(parameter):
        return value
    ordered = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return ordered.copy_(value)


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of the dimensions in memory, or `None` if the tensor is not dense."""
    try:
        return dim_order(tensor.shape, tensor.stride())
    except LayoutError:
        return None
