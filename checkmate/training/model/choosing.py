"""Chooses how the training side sees what a script has passed."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkmate.training.errors import SessionError
from checkmate.training.model.ddp import DdpModel
from checkmate.training.model.trained import TrainedModel


def model_of(module: object) -> TrainedModel:
    """Return what a script has passed, as the rest of the training side sees it.

    Raises:
        SessionError: It is not a model that can be protected.
    """
    if not isinstance(module, DistributedDataParallel):
        raise SessionError(
            f"a {type(module).__name__} is not a DistributedDataParallel: wrap the model in one and pass that"
        )
    if not dist.is_initialized():
        raise SessionError("call torch.distributed.init_process_group() first")
    return DdpModel(module)
