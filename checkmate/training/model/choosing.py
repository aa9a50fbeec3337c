"""Chooses how the training side sees what a script has passed."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkmate.training.errors import SessionError
from checkmate.training.model.ddp import DdpModel
from checkmate.training.model.trained import TrainedModel


def model_of(module: object) -> TrainedModel:
    """Return what a script has passed, as the rest of the training side sees it.

    Raises:
        SessionError: It is not a model that can be protected.
        RefusedError: It is sharded in a way that shadow nodes can't follow.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds
    sharded = fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))
    if not sharded and not isinstance(module, DistributedDataParallel):
        raise SessionError(
            f"a {type(module).__name__} is not a DistributedDataParallel: wrap the model in one and pass "
            "that, or apply fully_shard to the model and pass it"
        )
    if not dist.is_initialized():
        raise SessionError("call torch.distributed.init_process_group() first")
    if isinstance(module, DistributedDataParallel):
        return DdpModel(module)
    from checkmate.training.model.fsdp import FsdpModel  # noqa: PLC0415 - takes seconds

    return FsdpModel(module)
