"""Gives a checkpoint the keys under which torchtitan saves and loads its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkmate.consolidate.assemble import is_not_trained
from checkmate.state import StateError


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
    found: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for stage in stages:
        if twice := found.keys() & stage["model"].keys():
            raise StateError(f"two pipeline stages have {min(twice)}: torchtitan needs names of their own")
        found |= stage["model"]
        optimizer |= _flat(stage["optimizer"])
    found["optimizer"] = optimizer
    if stages[0]["scheduler"] is not None:
        found["lr_scheduler"] = stages[0]["scheduler"]
    for stage in stages:
        for _, extra in sorted(stage["extra"].items()):
            if isinstance(extra, dict):
                _merge(found, extra)
    return found


def _flat(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch's `flatten_optimizer_state_dict` does."""
    found: dict[str, Any] = {}
    for group in optimizer["param_groups"]:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name in group["params"]:
            if is_not_trained(name):
                continue  # torch does not flatten it either
            found |= {f"state.{name}.{key}": value for key, value in optimizer["state"].get(name, {}).items()}
            found |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
    return found


def _merge(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add what is not there yet, at any depth."""
    for key, value in more.items():
        if isinstance(value, dict):
            inner = found.setdefault(key, {})
            if isinstance(inner, dict):
                _merge(inner, value)
        else:
            found.setdefault(key, value)
