"""Chooses how the training side sees what a script has passed."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from checkmate.optim.several import parameters_of
from checkmate.training.errors import RefusedError, SessionError
from checkmate.training.model.ddp import DdpModel, ShareModel
from checkmate.training.model.trained import BareModel, TrainedModel


def model_of(module: object, copies: str = "switch", optimizer: object = None) -> TrainedModel:
    """Return what a script has passed, as the rest of the training side sees it.

    Args:
        module: What it has passed.
        copies: The job's way of copies: `switch` or `host`.
        optimizer: The optimizer, or several.

    Raises:
        SessionError: It is not a model that can be protected.
        RefusedError: It is sharded in a way that shadow nodes can't follow.
    """
    if isinstance(module, DistributedDataParallel):
        if copies == "host" and type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            return ShareModel(module, _owned(optimizer))
        return DdpModel(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds
    is_sharded = fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))
    if copies == "host" and isinstance(module, nn.Module) and not isinstance(module, DataParallel):
        if is_sharded or any(hasattr(parameter, "placements") for parameter in module.parameters()):
            from checkmate.training.model.fsdp import FsdpModel  # noqa: PLC0415 - takes seconds

            return FsdpModel(module)
        return BareModel(module)
    if is_sharded:
        from checkmate.training.model.fsdp import FsdpReplica  # noqa: PLC0415

        return FsdpReplica(module)
    raise SessionError(
        f"a {type(module).__name__} is not a DistributedDataParallel: wrap the model in one and pass "
        "that, or apply fully_shard to the model and pass it"
    )


def _owned(optimizer: Any) -> set[torch.Tensor]:
    """Return the parameters that this rank's share of a `ZeroRedundancyOptimizer` steps."""
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise RefusedError(
            "ZeroRedundancyOptimizer with overlap_with_ddp=True steps within backward, which can't be "
            "followed: make it without"
        )
    shares = [
        [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        for groups in optimizer._partition_parameters()
    ]
    if not all(shares):  # on all ranks
        rank = next(rank for rank, share in enumerate(shares) if not share)
        raise RefusedError(
            f"ZeroRedundancyOptimizer has no parameter to train for rank {rank} of its group, and a rank "
            "without any can't be followed: use fewer ranks, or give it only parameters that need gradients"
        )
    return parameters_of(optimizer.optim)
