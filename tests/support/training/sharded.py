"""Small models sharded by `fully_shard`, and their gradients over a ring, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingPlace
from checkmate.training.gradients.buckets import GradientBuckets
from checkmate.training.gradients.fsdp_hooks import ShardedHooks
from checkmate.training.gradients.ring_reducer import RingReducer
from checkmate.training.model.fsdp import FsdpReplica
from checkmate.wire.layout import make_layout
from tests.support.rings import loopback

FIRST_ITERATION = 7


def replicated(replicas: int, shards: int, tensor: int = 1, device: str = "cpu") -> DeviceMesh:
    """Return the mesh of native HSDP with tensor parallelism; `dp_shard` is that of a protected model."""
    ranks = torch.arange(replicas * shards * tensor).view(replicas, shards, tensor)
    return DeviceMesh(device, ranks, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def hybrid(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh on which native HSDP shards and replicates."""
    return mesh["dp_replicate", "dp_shard"]


@contextlib.contextmanager
def hooked(
    model: nn.Module, rank: int, replicas: int, ports: list[int]
) -> Iterator[tuple[ShardedHooks, Ring]]:
    """Have a model reduced over the replicas of this rank's part, of which each has a port."""
    wrapped = FsdpReplica(model)
    layout = make_layout(wrapped.describe(), 2, bucket_bytes=500)
    parts = len(wrapped.shard_ranks)
    place = RingPlace(rank // parts, loopback(replicas), 2, port=ports[rank % parts], fingerprint=b"")
    dist.barrier()  # the first fully_shard of a process imports for a long time
    with connect_ring(place, timeout=20) as ring:
        parameters = list(wrapped.trained().values())
        pinned = any(parameter.is_cuda for parameter in parameters)
        reducer = RingReducer(ring, layout, pinned=pinned, divisor=None if wrapped.averages else 1)
        hooks = ShardedHooks(wrapped, GradientBuckets(layout, parameters, reducer, FIRST_ITERATION))
        hooks.register()
        try:
            yield hooks, ring
        finally:
            hooks.close()


def rows(rank: int, iteration: int, part: int = 0) -> torch.Tensor:
    """Return a rank's batch."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * iteration + part)
    return torch.randint(0, 11, (5,), generator=generator)


class ShardedNet(nn.Module):
    """Uneven rows, a dimension smaller than the number of shards, tied weights, frozen and unused parameters.

    `sometimes` is used if the forward says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        blocks = [nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 6)) for _ in range(2)]
        for bias in blocks[0][0].parameters():
            bias.requires_grad_(bias.dim() > 1)
        self.blocks = nn.ModuleList(blocks)
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


class SplitBlock(nn.Module):
    """Layers that tensor parallelism splits by columns, by rows, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.down(torch.tanh(self.up(self.before(hidden))))
        return out


class SplitNet(nn.Module):
    """Uneven parts: two ranks have 6 and 5 rows of the embedding, and their shards 3, 3, 3 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(SplitBlock() for _ in range(2))
        self.sometimes = SplitBlock()
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 12, bias=False)

    def forward(self, rows: torch.Tensor, *, more: bool = False) -> torch.Tensor:
        hidden = self.embedding(rows[None, :4])
        for block in self.blocks:
            hidden = block(hidden)
        if more:
            hidden = self.sometimes(hidden)
        out: torch.Tensor = self.head(self.norm(hidden))
        return out


def split(model: SplitNet, mesh: DeviceMesh) -> SplitNet:
    """Apply tensor parallelism, with sequence parallelism between the layers."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for block in ("blocks.0", "blocks.1", "sometimes"):
        plan[f"{block}.before"] = SequenceParallel()
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, plan)
    return model
