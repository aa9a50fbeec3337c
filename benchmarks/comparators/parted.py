"""What the systems share that give each rank a part of the state."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.comparators.system import CheckpointSystem


class PartedState(CheckpointSystem):
    """Its state has buffers first: ranks have different ones, and DDP takes rank 0's."""

    def state(self) -> dict[str, Any]:
        """Return the state to save, by name. The tensors are the job's own, not copies."""
        return {
            "buffers": dict(self._ddp.module.named_buffers()),
            "parameters": dict(self._ddp.module.named_parameters()),
            "optimizer": self._optimizer.state_dict(),
        }

    def install(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        super().install(
            {"model": {**state["buffers"], **state["parameters"]}, "optimizer": state["optimizer"]}
        )

    def buffers(self) -> list[torch.Tensor]:
        """Return the tensors that are rank 0's part."""
        return list(self._ddp.module.buffers())
