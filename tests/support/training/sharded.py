"""Small models sharded by `fully_shard`, on CPU ranks, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def replicated(replicas: int, shards: int) -> DeviceMesh:
    """Return the mesh (replicas, shards) of native HSDP; its `dp_shard` is that of a protected model."""
    ranks = torch.arange(replicas * shards).view(replicas, shards)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard"))


class ShardedNet(nn.Module):
    """Uneven rows, a dimension smaller than the number of shards, tied weights, frozen and unused parameters.

    `sometimes` is used if the forward says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        made = [nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 6)) for _ in range(2)]
        for bias in made[0][0].parameters():
            bias.requires_grad_(bias.dim() > 1)
        self.blocks = nn.ModuleList(made)
        self.sometimes = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(1))
        self.seen: torch.Tensor

    def forward(self, rows: torch.Tensor, *, more: bool = False) -> torch.Tensor:
        hidden = self.embedding(rows)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if more:
            hidden = hidden + self.sometimes(hidden)
        self.seen += 1
        out: torch.Tensor = self.head(hidden) * self.scale
        return out


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Apply `fully_shard` to the blocks, to `sometimes` and to the model."""
    for unit in [*model.blocks, model.sometimes, model]:  # type: ignore[misc]
        fully_shard(unit, mesh=mesh, **options)
    return model
