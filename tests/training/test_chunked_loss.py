"""A loss in chunks, whose backward reaches the head before that of the model: torchtitan's, for example."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from checkmate.state import local_of
from checkmate.training.errors import RefusedError
from testbed.ports import free_port
from tests.support.training.rank_processes import RankProcesses
from tests.support.training.sharded import FIRST_ITERATION, hooked, hybrid, replicated, rows

SHARDS = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses() as processes:
        yield processes


class HeadlessNet(nn.Module):
    """Returns what its head would get. The head is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.embedding(rows)).tanh()
        return out


def sharded(model: Any, mesh: Any) -> Any:
    for unit in (model.body, model.head, model):
        fully_shard(unit, mesh=mesh)
    return model


def backward_in_chunks(model: Any, batch: torch.Tensor, *, whole: bool = True) -> None:
    """Compute gradients as torchtitan's `ChunkedLossWrapper` does; only those of the head if not `whole`."""
    hidden = model(batch)
    chunks = [chunk.detach().requires_grad_() for chunk in hidden.split(2)]
    for chunk in chunks:
        model.head.set_requires_gradient_sync(chunk is chunks[-1])
        model.head(chunk).square().mean().backward()
    if whole:
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))


def follow_native(rank: int, count: int, ports: list[int]) -> list[int]:
    """Compare gradients with those of native HSDP; return the iterations that ended, in order."""
    torch.manual_seed(1)
    mesh, plain = replicated(2, SHARDS), HeadlessNet()
    native_model, hooked_model = sharded(copy.deepcopy(plain), hybrid(mesh)), sharded(plain, mesh["dp_shard"])
    reduced: list[int] = []
    with hooked(hooked_model, rank, 2, ports) as (hooks, _):
        hooks.on_reduced = reduced.append
        for iteration in range(3):
            for model in (hooked_model, native_model):
                backward_in_chunks(model, rows(rank, iteration))
            assert len(reduced) == iteration + 1
            for parameter, native in zip(hooked_model.parameters(), native_model.parameters(), strict=True):
                assert torch.equal(local_of(parameter.grad), local_of(native.grad))
            for model in (hooked_model, native_model):
                model.zero_grad()
    return reduced


def test_gradients_are_those_of_native_hsdp(ranks: RankProcesses) -> None:
    iterations = ranks.run(4, follow_native, [free_port(), free_port()])
    assert iterations == [[FIRST_ITERATION, FIRST_ITERATION + 1, FIRST_ITERATION + 2]] * 4


def leave_the_rest_out(rank: int, count: int, ports: list[int]) -> str:
    """Return the error of the next forward."""
    model = sharded(HeadlessNet(), replicated(2, SHARDS)["dp_shard"])
    with hooked(model, rank, 2, ports):
        backward_in_chunks(model, rows(rank, 0), whole=False)
        with pytest.raises(RefusedError) as excinfo:
            model(rows(rank, 1))
    return str(excinfo.value)


def test_a_backward_of_the_head_alone_is_refused(ranks: RankProcesses) -> None:
    """Its gradients would stay those of one replica."""
    for error in ranks.run(4, leave_the_rest_out, [free_port(), free_port()]):
        assert error.startswith("backward() has reached head.weight, but not ")
        assert error.endswith("call backward() on what the model returns, before its next forward")
