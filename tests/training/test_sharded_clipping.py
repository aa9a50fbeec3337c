"""Clipping over shards, tensor parallelism and pipeline stages: torch's bits, and one factor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import checkmate
from checkmate.state import local_of
from checkmate.training.errors import RefusedError
from checkmate.training.model.fsdp import FsdpReplica
from checkmate.training.record.step_checks import StepChecks
from checkmate.training.record.windows import Slices
from checkmate.training.record.wrapped import ClipListener
from checkmate.training.start.places import lay_out
from testbed.ports import free_port
from tests.support.training.rank_processes import RankProcesses
from tests.support.training.sharded import ShardedNet, SplitNet, hooked, replicated, rows, shard, split

MAX_NORM = 0.01


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of this rank's gradients."""
    return [local_of(p.grad).clone() for p in model.parameters() if p.grad is not None]


@contextlib.contextmanager
def listening(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield the factors that a step record would get."""
    factors: list[torch.Tensor] = []
    parameters = list(FsdpReplica(model).trained().values())
    listener = ClipListener(parameters, lambda: None, lambda _, factor: factors.append(factor))
    yield factors
    listener.close()


def clip(
    model: nn.Module,
    function: Callable[[nn.Module], torch.Tensor],
    torchs: Callable[[nn.Module], torch.Tensor],
) -> float:
    """Clip with torch's function and ours; return the factor, after a comparison of all results."""
    with contextlib.ExitStack() as undo:
        factors = undo.enter_context(listening(model))
        before = gradients(model)
        norm = torchs(model)
        expected = gradients(model)
        for parameter, gradient in zip(
            (p for p in model.parameters() if p.grad is not None), before, strict=True
        ):
            assert parameter.grad is not None
            local_of(parameter.grad).copy_(gradient)
        assert torch.equal(whole(function(model)), whole(norm))
    assert all(torch.equal(actual, two) for actual, two in zip(gradients(model), expected, strict=True))
    (factor,) = factors
    assert type(factor) is torch.Tensor and factor.dtype == torch.float32
    assert all(torch.equal(actual * factor, two) for actual, two in zip(before, expected, strict=True))
    return float(factor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_shards(rank: int, count: int, ports: list[int], tensor: int, norm_type: float) -> float:
    """Clip gradients that were reduced over two replicas."""
    torch.manual_seed(1)
    mesh = replicated(2, count // (2 * tensor), tensor)
    model = split(SplitNet(), mesh["tp"]) if tensor > 1 else ShardedNet()
    shard(model, mesh["dp_shard"])
    with hooked(model, rank, 2, ports):
        model(rows(rank // tensor, 0)).square().mean().backward()
        return clip(
            model,
            lambda module: checkmate.clip_grad_norm_(module.parameters(), MAX_NORM, norm_type),
            lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM, norm_type),
        )


@pytest.mark.parametrize(
    ("tensor", "norm_type"),
    [(1, 2.0), (1, 1.0), (2, 2.0), (2, math.inf)],
)
def test_clipping_has_one_factor_on_all_ranks(ranks: RankProcesses, tensor: int, norm_type: float) -> None:
    """That of the norm of the whole model, to the last bit. PyTorch has no maximum norm of empty shards."""
    factors = ranks.run(4, clip_shards, [free_port(), free_port()], tensor, norm_type)
    assert len(set(factors)) == 1 and 0 < factors[0] < 1


def clip_as_torchtitan(
    model: nn.Module, stages: DeviceMesh, norm_type: float, clip_grads_with_norm_: Callable[..., None]
) -> torch.Tensor:
    """Combine the norms of pipeline stages, as torchtitan's `clip_grad_norm_` does."""
    parameters = list(model.parameters())
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type))
    norm **= norm_type
    dist.all_reduce(norm, group=stages.get_group())
    norm **= 1.0 / norm_type
    clip_grads_with_norm_(parameters, MAX_NORM, norm)
    return norm


def clip_stages(rank: int, count: int, norm_type: float) -> float:
    """Clip the gradients of two stages, each with two shards."""
    mesh = DeviceMesh("cpu", torch.arange(count).view(2, 2), mesh_dim_names=("pp", "dp_shard"))
    torch.manual_seed(rank // 2)
    model = shard(ShardedNet(), mesh["dp_shard"])
    model(rows(rank, 0)).square().mean().backward()

    def combine(function: Callable[..., None]) -> Callable[[nn.Module], torch.Tensor]:
        return lambda module: clip_as_torchtitan(module, mesh["pp"], norm_type, function)

    return clip(
        model, combine(checkmate.clip_grads_with_norm_), combine(torch.nn.utils.clip_grads_with_norm_)
    )


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_norms_that_a_script_combines_itself_have_one_factor(ranks: RankProcesses, norm_type: float) -> None:
    factors = ranks.run(4, clip_stages, norm_type)
    assert len(set(factors)) == 1 and 0 < factors[0] < 1


def clip_with_torchs_own(rank: int, count: int) -> str:
    """Return the error of the step after torch's own function."""
    torch.manual_seed(1)
    mesh = replicated(1, 2, 2)
    model = shard(split(SplitNet(), mesh["tp"]), mesh["dp_shard"])
    wrapped = FsdpReplica(model)
    names: dict[str, Any] = wrapped.trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slices = Slices(lay_out(wrapped, 1), list(names.values()), optimizer)
    checks = StepChecks(optimizer, names, slices)
    model(rows(0, 0)).square().mean().backward()
    checks.gradients.start()
    checks.check(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    with pytest.raises(RefusedError) as excinfo:
        checks.check(optimizer)
    return str(excinfo.value)


def test_torchs_own_function_is_noticed_on_all_ranks(ranks: RankProcesses) -> None:
    for error in ranks.run(4, clip_with_torchs_own):
        assert "was changed between its reduction and the optimizer's step" in error
        assert "clip by norm, with checkmate.clip_grad_norm_ or checkmate.clip_grads_with_norm_" in error
