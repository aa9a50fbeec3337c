"""Sharded stages under PyTorch's pipeline schedules, which reduce gradients after backward, and not in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from checkmate.state import local_of
from testbed.ports import free_port
from tests.support.training.rank_processes import RankProcesses
from tests.support.training.sharded import FIRST_ITERATION, hooked

STAGES, REPLICAS, WIDTH, ROWS, PARTS = 2, 2, 5, 8, 4


class Stage(nn.Module):
    """A layer that is a unit of FSDP's, one that belongs to the root, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh())
        self.last = nn.Linear(7, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.block(rows))
        return out


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def train(module: nn.Module, mesh: DeviceMesh, iterations: int) -> Iterator[list[torch.Tensor | None]]:
    """Yield this rank's gradients of each iteration."""
    stage = PipelineStage(
        module, mesh["pp"].get_local_rank(), STAGES, torch.device("cpu"), group=mesh["pp"].get_group()
    )
    schedule = Schedule1F1B(stage, PARTS, loss_fn=loss, scale_grads=False)
    for iteration in range(iterations):
        generator = torch.Generator().manual_seed(10 * iteration + mesh["dp_replicate"].get_local_rank())
        rows = torch.randn(ROWS, WIDTH, generator=generator)
        schedule.step(*([rows] if stage.is_first else []), target=rows if stage.is_last else None)
        yield [None if p.grad is None else local_of(p.grad).clone() for p in module.parameters()]
        module.zero_grad()


def follow_native(rank: int, count: int, ports: list[int]) -> int:
    """Compare the gradients of stages with our hooks and with native HSDP."""
    names = ("pp", "dp_replicate", "dp_shard")
    mesh = DeviceMesh("cpu", torch.arange(count).view(STAGES, REPLICAS, 1), mesh_dim_names=names)
    torch.manual_seed(rank // REPLICAS)
    hooked_stage = Stage()
    native_stage = copy.deepcopy(hooked_stage)
    for module, part in ((hooked_stage, mesh["dp_shard"]), (native_stage, mesh["dp_replicate", "dp_shard"])):
        fully_shard(module.block, mesh=part)
        fully_shard(module, mesh=part)
    compared = 0
    iterations: list[int] = []
    expected = list(train(native_stage, mesh, 3))
    with hooked(hooked_stage, rank % REPLICAS, REPLICAS, ports[rank // REPLICAS :]) as (hooks, _):
        hooks.on_reduced = iterations.append
        for iteration, gradients in enumerate(train(hooked_stage, mesh, 3)):
            assert iterations == [FIRST_ITERATION + offset for offset in range(iteration + 1)]
            for actual, native in zip(gradients, expected[iteration], strict=True):
                assert (actual is None) == (native is None)
                if actual is not None and native is not None:
                    assert torch.equal(actual, native)
                    compared += actual.numel()
    return compared


def test_gradients_under_a_schedule_are_those_of_native_hsdp(ranks: RankProcesses) -> None:
    assert set(ranks.run(STAGES * REPLICAS, follow_native, [free_port(), free_port()])) == {3 * (42 + 40)}
