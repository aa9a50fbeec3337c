"""Makes the dictionary of a checkpoint that plain PyTorch loads, from what shadow nodes gave. Pure."""

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


def checkpoint(snapshot: Snapshot, *, by_name: bool = False) -> dict[str, Any]:
    """A job's checkpoint: one DP group's dictionary, or `{"group0": ..., "group1": ...}` of several.

    Each has `model` (for `load_state_dict`), `optimizer`, `scheduler`, `scaler` (likewise; `None` where there
    is none), `scheduler_class` (empty where there is none), `rng` and `extra` by global rank, `buffers` by
    name (and `rank_buffers`, where ranks have their own), `job`, `run`, `generation`, `group` and
    `iteration`, the last one that was trained. `by_name`, for PyTorch Distributed Checkpoint, which makes
    strings of all keys: the optimizer calls parameters by name instead of by number (`load_state_dict` takes
    either), and `exact` has scheduler, scaler, rng and extra as bytes of `torch.save`. `StateError` where a
    part can't be read.
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
    # Where ranks don't share buffers each part has the rank's own; the first rank's are in `buffers` already.
    own = {rank: state.loads(part.buffers) for rank, part in parts.items() if part.position and part.buffers}
    small = {
        "scheduler": plain(state.loads(step.scheduler)) if step.scheduler else None,
        "scaler": plain(state.loads(step.scaler)) if step.scaler else None,
        "rng": {rank: state.load_generators(part.rng) for rank, part in parts.items() if part.rng},
        "extra": {rank: plain(state.loads(part.extra)) for rank, part in parts.items() if part.extra},
    }
    found: dict[str, Any] = {
        "job": snapshot.job.job,
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
    """The model's `state_dict()`: what it calls tensors, tied ones as often as it does."""
    tensors = dict(buffers)
    for number, parameter in enumerate(group.layout.parameters):
        tensors[parameter.name], _ = group.states[number]
    keys = group.names or {name: name for name in tensors}
    return {key: tensors[name] for key, name in sorted(keys.items()) if name in tensors}


def optimizer_state(
    group: GroupState, step: pb.Step, frozen: Mapping[int, Mapping[str, object]], by_name: bool
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes; hyperparameters are those of the next step.

    `frozen`: state of parameters that training doesn't reduce.
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
    """With Python's numbers and tensors for NumPy's, which `torch.load` reads only when told to."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return type(value)((key, plain(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value
