"""Builds the dictionary of a checkpoint, for plain PyTorch or with torchtitan's keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from checkmate import state
from checkmate.consolidate.chunks import Select, equal_bits, everything
from checkmate.consolidate.snapshot import GroupState, Snapshot
from checkmate.consolidate.stage_state import StageState, assemble_stage
from checkmate.consolidate.stages import Trained, stages
from checkmate.job.partial import present_of
from checkmate.job.schema import Job
from checkmate.optim.options import parse_options
from checkmate.optim.supported import FROZEN
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.state import StateError


def checkpoint(snapshot: Snapshot, *, by_name: bool = False) -> dict[str, Any]:
    """Return a job's checkpoint: its model's dictionary, or `{"group0": ..., "group1": ...}` for stages.

    Each stage has `model`, `optimizer`, `scheduler` and `scaler` for `load_state_dict` (the last two may be
    `None`), `scheduler_class` (may be empty), `rng` and `extra` by global rank, `buffers` by name (and
    `rank_buffers` if ranks have different ones), `ranks` in order and `tp`, how many of these share a sample,
    `present`, the replicas of the job that were there if others were away,
    `protocol` (the format), `job`, `run`, `generation`, `group` (the stage), `iteration`, the last one
    trained, and `ended`, whether training ended with it. Chunks of a sharded model are removed from the
    snapshot as whole tensors are made of them, so the memory for both is never needed at once.

    Args:
        snapshot: The state.
        by_name: For PyTorch Distributed Checkpoint, which converts all keys to strings. The optimizer
            identifies parameters by name instead of by number (`load_state_dict` accepts both), and `exact`
            has scheduler, scaler, rng and extra as bytes of `torch.save`.

    Raises:
        StateError: Some part can't be read, or chunks are not whole tensors together.
    """
    trained = [Trained.from_layout(group_state.layout) for group_state in snapshot.groups]
    checkpoints = [
        stage_of(snapshot, number, {group: snapshot.groups[group] for group in groups}, by_name=by_name)
        for number, groups in enumerate(stages(snapshot.job, trained))
    ]
    return (
        checkpoints[0]
        if len(checkpoints) == 1
        else {f"group{number}": group_state for number, group_state in enumerate(checkpoints)}
    )


def stage_of(
    snapshot: Snapshot,
    number: int,
    members: Mapping[int, GroupState],
    select: Select = everything,
    *,
    by_name: bool = False,
) -> dict[str, Any]:
    """Return a stage's dictionary, as in `checkpoint`, with what `select` selects of each tensor.

    Args:
        snapshot: The job's state; its `groups` are not used.
        number: The stage's number.
        members: Its DP groups' states. Chunks are removed from them if there are several.
        select: As in `assemble_stage`.
        by_name: As in `checkpoint`.

    Raises:
        StateError: As `checkpoint`.
    """
    first, *_ = members.values()
    stage = assemble_stage(members, select)
    buffers = {name: tensor for name, tensor in stage.beside.items() if not state.is_frozen_state(name)}
    parts = _parts(snapshot.job, members)
    step = next((part.step for part in first.record.parts if part.position == 0), pb.Step())
    small = {
        "scheduler": plain(state.loads(step.scheduler)) if step.scheduler else None,
        "scaler": plain(state.loads(step.scaler)) if step.scaler else None,
        "rng": {rank: state.load_generators(part.rng) for rank, part in parts.items() if part.rng},
        "with_gradient": [stage.names[number] for number in step.with_gradient],
        "extra": {rank: plain(state.loads(part.extra)) for rank, part in parts.items() if part.extra},
    }
    result: dict[str, Any] = {
        "job": snapshot.job.job,
        "protocol": PROTOCOL,
        "run": snapshot.run,
        "generation": snapshot.generation,
        "group": number,
        "ranks": sorted(rank.rank for group in members for rank in snapshot.job.dp_groups[group].ranks),
        "tp": 1 if snapshot.job.mesh is None else snapshot.job.mesh.tp,
        "iteration": snapshot.iteration,
        "ended": step.last,
        "model": _model(stage, buffers, first.names),
        "optimizer": _optimizer_state(first.optimizer, stage, step, by_name),
        "buffers": buffers,
        "scheduler_class": step.scheduler_class,
        **small,
    }
    if present := present_of(snapshot.job):
        result["present"] = list(present)
    if any(first.counters):
        result["optimizer_counters"] = [plain(dict(counters)) for counters in first.counters]
    if rank_buffers := _rank_buffers(snapshot.job, members, stage.buffers, buffers):
        result["rank_buffers"] = rank_buffers
    if by_name:
        result["exact"] = state.dumps(small)
    return result


def _parts(job: Job, members: Mapping[int, GroupState]) -> dict[int, pb.RecordPart]:
    """Return the parts of the records by global rank."""
    return {
        job.dp_groups[group].ranks[part.position].rank: part
        for group, member in members.items()
        for part in member.record.parts
    }


def _rank_buffers(
    job: Job,
    members: Mapping[int, GroupState],
    first: Mapping[int, Mapping[str, torch.Tensor]],
    shared: Mapping[str, torch.Tensor],
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the buffers of ranks whose own are not those that the stage has, by global rank.

    Those of each DP group's first rank are in `first`, those of the others in their parts of the record.
    """
    by_rank = {}
    for group, member in members.items():
        frozen = {parameter.name for parameter in member.layout.frozen}
        by_rank[job.dp_groups[group].ranks[0].rank] = {
            name: tensor
            for name, tensor in first[group].items()
            if not (name in shared and equal_bits(tensor, shared[name]))
        }
        for part in member.record.parts:
            if part.position and part.buffers:
                tensors = state.loads(part.buffers)
                rank = job.dp_groups[group].ranks[part.position].rank
                by_rank[rank] = {name: tensor for name, tensor in tensors.items() if name not in frozen}
    return {rank: tensors for rank, tensors in by_rank.items() if tensors}


def _model(
    stage: StageState, buffers: Mapping[str, torch.Tensor], names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the model's `state_dict()`, with tied tensors under all of their names, and extra states."""
    plain_buffers = {
        n: plain(state.unpacked(t)) if state.is_extra_state(n) else t for n, t in buffers.items()
    }
    tensors = {**plain_buffers, **{name: stage.states[number][0] for number, name in enumerate(stage.names)}}
    keys = names or {name: name for name in tensors}
    return {key: tensors[name] for key, name in sorted(keys.items()) if name in tensors}


def _optimizer_state(
    spec: pb.OptimizerSpec, stage: StageState, step: pb.Step, by_name: bool
) -> dict[str, Any]:
    """Return a state for `optimizer.load_state_dict`, with the hyperparameters of the next step."""
    texts = list(step.next_options) or list(step.options) or [group.options for group in spec.groups]
    frozen = state.frozen_states(stage.beside)
    states: dict[int | str, dict[str, object]] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for group_spec, text in zip(spec.groups, texts, strict=True):
        keys: list[int | str] = []
        for number in group_spec.parameters:
            name = stage.names[number] if number != FROZEN else not_trained(count)
            keys.append(name if by_name else count)
            values = frozen.get(count, {}) if number == FROZEN else stage.states[number][1]
            count += 1
            if values:
                states[keys[-1]] = dict(values)
        options = {**plain(parse_options(text)), "params": keys}
        groups.append({**options, "param_names": list(group_spec.names)} if group_spec.names else options)
    return {"state": states, "param_groups": groups}


def not_trained(number: int) -> str:
    """Return what identifies the parameter of this number in an optimizer, if training does not reduce it."""
    return f"(not trained {number})"


def is_not_trained(name: str) -> bool:
    """Return whether a name is one of `not_trained`."""
    return name.startswith("(not trained ")


def plain(value: Any) -> Any:
    """Replace NumPy's scalars and arrays, which `torch.load` rejects by default, by numbers and tensors."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        items = {key: plain(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # a Counter counts other iterables
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def keyed_for_torchtitan(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with torchtitan's keys, for all pipeline stages together.

    Tensors of the model are under their names. `optimizer` is flat: `state.NAME.exp_avg`,
    `param_groups.NAME.lr`. `lr_scheduler` has the scheduler. If `extra()` returns dictionaries, their entries
    are there too; of equal ones the lowest rank's.

    Args:
        checkpoint: The result of `assemble.checkpoint(..., by_name=True)`.

    Raises:
        StateError: Two pipeline stages have a parameter of the same name.
    """
    stages = [checkpoint] if "model" in checkpoint else list(checkpoint.values())
    result: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for stage in stages:
        if twice := result.keys() & stage["model"].keys():
            raise StateError(f"two pipeline stages have {min(twice)}: torchtitan needs names of their own")
        result |= stage["model"]
        optimizer |= _flat(stage["optimizer"])
    result["optimizer"] = optimizer
    if stages[0]["scheduler"] is not None:
        result["lr_scheduler"] = stages[0]["scheduler"]
    for stage in stages:
        for _, extra in sorted(stage["extra"].items()):
            if isinstance(extra, dict):
                _merge(result, extra)
    return result


def _flat(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch's `flatten_optimizer_state_dict` does."""
    result: dict[str, Any] = {}
    for group in optimizer["param_groups"]:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name in group["params"]:
            if is_not_trained(name):
                continue  # torch does not flatten it either
            result |= {
                f"state.{name}.{key}": value for key, value in optimizer["state"].get(name, {}).items()
            }
            result |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
    return result


def _merge(target: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add what is not there yet, at any depth."""
    for key, value in more.items():
        if isinstance(value, dict):
            inner = target.setdefault(key, {})
            if isinstance(inner, dict):
                _merge(inner, value)
        else:
            target.setdefault(key, value)
