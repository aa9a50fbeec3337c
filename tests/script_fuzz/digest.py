"""Digests of everything that a script has, by part. They depend on each bit, and on types and shapes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tests.script_fuzz.script import Script


def digests(script: Script, loss: float) -> dict[str, str]:
    """Return the SHA-256 of each part of a script's state, cut to 12 digits."""
    return {name: _sha(value)[:12] for name, value in _parts(script, loss).items()}


def _parts(script: Script, loss: float) -> dict[str, Any]:
    model = script.model
    optimizers = [optimizer for optimizer in (script.optimizer, script.second) if optimizer is not None]
    return {
        "parameters": dict(model.named_parameters()),
        "flags": [p.requires_grad for p in model.parameters()],
        "buffers": dict(model.named_buffers()),
        "modules": {name: m.get_extra_state() for name, m in model.named_modules() if _has_extra_state(m)},
        "optimizer": [list(_states(optimizer)) for optimizer in optimizers],
        "groups": [[_options(group) for group in optimizer.param_groups] for optimizer in optimizers],
        "scheduler": script.scheduler and script.scheduler.state_dict(),
        "scaler": script.scaler and script.scaler.state_dict(),
        "generators": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "extra": script.extra(),
        "loss": loss,
    }


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Mapping[str, Any]]:
    """Yield the state of each parameter, in the optimizer's order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield optimizer.state.get(parameter, {})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters, and its number of parameters."""
    return {name: len(value) if name == "params" else value for name, value in group.items()}


def _sha(value: Any) -> str:
    digest = hashlib.sha256()
    for data in _bytes(value):
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _bytes(value[key])
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for item in value:
            yield from _bytes(item)
    else:
        yield repr(value).encode()
