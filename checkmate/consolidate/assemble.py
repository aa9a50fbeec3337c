"""Builds the dictionary of a checkpoint that plain PyTorch loads, from a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from checkmate import state
from checkmate.consolidate.snapshot import GroupState, Snapshot
from checkmate.optim.options import parse_options
from checkmate.optim.supported import FROZEN
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL


def checkpoint(snapshot: Snapshot, *, by_name: bool = False) -> dict[str, Any]:
    """Return a job's checkpoint: its DP group's dictionary, or `{"group0": ..., "group1": ...}` for several.

    Each group has `model`, `optimizer`, `scheduler` and `scaler` for `load_state_dict` (the last two may be
    `None`), `scheduler_class` (may be empty), `rng` and `extra` by global rank, `buffers` by name (and
    `rank_buffers` if ranks have different ones), `protocol` (the format), `job`, `run`, `generation`,
    `group` and `iteration`, the last one trained.

    Args:
        snapshot: The state.
        by_name: For PyTorch Distributed Checkpoint, which converts all keys to strings. The optimizer
            identifies parameters by name instead of by number (`load_state_dict` accepts both), and `exact`
            has scheduler, scaler, rng and extra as bytes of `torch.save`.

    Raises:
        StateError: Some part can't be read.
    """
    groups = [_group(snapshot, index, group, by_name) for index, group in enumerate(snapshot.groups)]
    return groups[0] if len(groups) == 1 else {f"group{index}": group for index, group in enumerate(groups)}


def _group(snapshot: Snapshot, index: int, group: GroupState, by_name: bool) -> dict[str, Any]:
    ranks = [rank.rank for rank in snapshot.job.dp_groups[index].ranks]
    parts = {ranks[part.position]: part for part in group.record.parts}
    step = next((part.step for part in group.record.parts if part.position == 0), pb.Step())
    everything = {name: state.loads(data) for name, data in group.record.buffers.items()}
    buffers = {name: tensor for name, tensor in everything.items() if not state.is_frozen_state(name)}
    states = {n: state.from_held(group.layout.parameters[n], *held) for n, held in group.states.items()}
    group = replace(group, states=states)
    # If ranks have different buffers, each part has the rank's own; the first rank's are in `buffers`.
    own = {rank: state.loads(part.buffers) for rank, part in parts.items() if part.position and part.buffers}
    small = {
        "scheduler": plain(state.loads(step.scheduler)) if step.scheduler else None,
        "scaler": plain(state.loads(step.scaler)) if step.scaler else None,
        "rng": {rank: state.load_generators(part.rng) for rank, part in parts.items() if part.rng},
        "extra": {rank: plain(state.loads(part.extra)) for rank, part in parts.items() if part.extra},
    }
    found: dict[str, Any] = {
        "job": snapshot.job.job,
        "protocol": PROTOCOL,
        "run": snapshot.run,
        "generation": snapshot.generation,
        "group": index,
        "iteration": snapshot.iteration,
        "model": _model(group, buffers),
        "optimizer": optimizer_state(group, step, state.frozen_states(everything), by_name),
        "buffers": buffers,
        "scheduler_class": step.scheduler_class,
        **small,
    }
    if own:
        found["rank_buffers"] = own
    if by_name:
        found["exact"] = state.dumps(small)
    return found


def _model(group: GroupState, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's `state_dict()`, with tied tensors under all of their names."""
    tensors = dict(buffers)
    for number, parameter in enumerate(group.layout.parameters):
        tensors[parameter.name], _ = group.states[number]
    keys = group.names or {name: name for name in tensors}
    return {key: tensors[name] for key, name in sorted(keys.items()) if name in tensors}


def optimizer_state(
    group: GroupState, step: pb.Step, frozen: Mapping[int, Mapping[str, object]], by_name: bool
) -> dict[str, Any]:
    """Return a state for `optimizer.load_state_dict`, with the hyperparameters of the next step.

    `frozen` is the state of parameters whose gradients are not reduced.
    """
    spec = group.optimizer
    texts = list(step.next_options) or list(step.options) or [one.options for one in spec.groups]
    states: dict[int | str, dict[str, object]] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for described, text in zip(spec.groups, texts, strict=True):
        keys: list[int | str] = []
        for number in described.parameters:
            known = group.layout.parameters[number].name if number != FROZEN else f"(not trained {count})"
            keys.append(known if by_name else count)
            values = frozen.get(count, {}) if number == FROZEN else group.states[number][1]
            count += 1
            if values:
                states[keys[-1]] = dict(values)
        made = {**plain(parse_options(text)), "params": keys}
        groups.append({**made, "param_names": list(described.names)} if described.names else made)
    return {"state": states, "param_groups": groups}


def plain(value: Any) -> Any:
    """Replace NumPy's scalars and arrays, which `torch.load` rejects by default, by numbers and tensors."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return type(value)((key, plain(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value
