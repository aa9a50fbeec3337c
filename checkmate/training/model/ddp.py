"""A model in PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.training.errors import RefusedError, SessionError
from checkmate.training.model.trained import TrainedModel


class DdpModel(TrainedModel):
    """The model inside of a DDP. Buckets are as large as DDP's own (`bucket_cap_mb`)."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Create it. Raise `SessionError` or `RefusedError` if this DDP can't be protected."""
        if ddp.mixed_precision is not None:
            raise SessionError("DDP's mixed_precision keeps its own gradients: use torch.autocast instead")
        for parameter in ddp._module_parameters:
            if hasattr(parameter, "_st_info"):  # what DDP has made of a DTensor
                raise RefusedError(
                    "tensor parallelism has split the model, and DDP does not keep which parts of parameters "
                    "a rank has: in place of DDP, apply fully_shard with "
                    'mesh=checkmate.job_mesh(device_type)["dp_shard"], whose size may be 1'
                )
        self.ddp = ddp
        self.outer, self.inner = ddp, ddp.module
        self.bucket_bytes = ddp.bucket_bytes_cap
        self.ignored = ddp.parameters_to_ignore

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether DDP broadcasts the first rank's buffers to all ranks."""
        return bool(getattr(self.ddp, "forward_sync_buffers", getattr(self.ddp, "broadcast_buffers", True)))

    @property
    def replicas(self) -> list[int] | None:
        """The global ranks over which DDP averages."""
        return dist.get_process_group_ranks(self.ddp.process_group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks over which DDP averages."""
        return self.ddp.process_group

    def check_forward(self) -> None:
        """Raise `RefusedError` during and after `join()`: DDP stays prepared for ranks without a batch."""
        if self.ddp._join_config.enable:
            raise RefusedError(
                "ddp.join() is for ranks that run out of batches, but each rank of a protected model trains "
                "in every iteration: give all ranks the same number of batches, as DistributedSampler does, "
                "and remove it"
            )


class ShareModel(DdpModel):
    """A DDP whose optimizer is a `ZeroRedundancyOptimizer`: this rank trains the parameters that it steps.

    Each rank is a DP group of its own, as with FSDP. The other ranks' parameters come from them after each
    step.
    """

    broadcasts_buffers = False
    is_alone = True

    def __init__(self, ddp: DistributedDataParallel, owned: Collection[torch.Tensor]) -> None:
        super().__init__(ddp)
        self._owned = set(owned)

    @property
    def replicas(self) -> None:
        """`None`: no other rank trains the same parameters, and only the job names the groups."""
        return

    @property
    def process_group(self) -> None:
        """`None`: no other rank has the same state."""
        return

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank steps, and frozen ones."""
        parameters = super().parameters().items()
        return {name: p for name, p in parameters if p in self._owned or not p.requires_grad}
