"""The model of a scenario as a script wraps it: by DDP, or by FSDP2 in shards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.training.model.fsdp import FsdpReplica
from tests.chaos.model import RandomNet
from tests.chaos.scenario import NetworkSpec, Scenario

_MIB: Final = 1 << 20
_UNITS: Final = ("first", "last", "embedding", "sometimes")
_ALWAYS: Final = _UNITS[:-1]
"""Used in each iteration. With bf16 compute, PyTorch can't accumulate gradients before a unit's first use."""
_POLICIES: Final = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-gradients": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


def wrap(model: RandomNet, scenario: Scenario) -> nn.Module:
    """Return what a script passes to Checkmate. Buckets are small, so that there are several."""
    mib = scenario.model.bucket_mb
    if not scenario.network.sharded:
        return DistributedDataParallel(model, bucket_cap_mb=mib, find_unused_parameters=True)
    FsdpReplica.bucket_bytes = int(mib * _MIB)
    mesh, policy = _mesh(scenario.network), _POLICIES[scenario.model.precision]
    units = _UNITS if scenario.model.precision == "fp32" else _ALWAYS
    for unit in (*(child for name, child in model.named_children() if name in units), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def _mesh(network: NetworkSpec) -> DeviceMesh:
    """Return the mesh of the shards, which has the replicas, too, if FSDP reduces over them."""
    if network.copies == "switch":
        return checkmate.shard_mesh("cpu")
    sizes = {"dp_replicate": network.ranks, "dp_shard": network.shards}
    present = {name: size for name, size in sizes.items() if size > 1}
    return init_device_mesh("cpu", tuple(present.values()), mesh_dim_names=tuple(present))


def synchronising(wrapped: Any, last: bool) -> AbstractContextManager[None]:
    """Have the backward of a micro-batch reduce gradients if it is the last one."""
    if isinstance(wrapped, DistributedDataParallel):
        return nullcontext() if last else wrapped.no_sync()
    wrapped.set_requires_gradient_sync(last)
    return nullcontext()
