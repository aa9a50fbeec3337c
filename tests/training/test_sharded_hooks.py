"""The hooks of a `fully_shard`ed model, in real processes: `.grad` is native HSDP's, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.ring import Ring, RingError, RingPlace, connect_ring
from checkmate.training.errors import RefusedError, SessionError
from checkmate.training.gradients.reducing import RingReducer
from checkmate.training.gradients.sharded_hooks import ShardedHooks
from checkmate.training.model.fsdp import FsdpModel
from checkmate.training.record.wrapped import ClipListener
from checkmate.training.start import membership
from checkmate.wire.layout import make_layout
from testbed.jobs import job_data
from testbed.ports import free_port
from tests.support.rings import loopback
from tests.support.training.rank_processes import RankProcesses
from tests.support.training.sharded import ShardedNet, replicated, shard

SHARDS = 2
FIRST_ITERATION = 7


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses() as processes:
        yield processes


@contextlib.contextmanager
def hooked(
    model: nn.Module, rank: int, replicas: int, ports: list[int]
) -> Iterator[tuple[ShardedHooks, Ring]]:
    """Have a model reduced over the replicas of this rank's shard."""
    wrapped = FsdpModel(model)
    layout = make_layout(wrapped.describe(), 2, bucket_bytes=500)
    place = RingPlace(rank // SHARDS, loopback(replicas), 2, port=ports[rank % SHARDS], fingerprint=b"")
    with connect_ring(place, timeout=20) as ring:
        hooks = ShardedHooks(
            wrapped, layout, RingReducer(ring, layout, average=wrapped.averages), FIRST_ITERATION
        )
        hooks.register()
        try:
            yield hooks, ring
        finally:
            hooks.close()


def rows(rank: int, iteration: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * iteration + part)
    return torch.randint(0, 11, (5,), generator=generator)


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class ShardedCase:
    """How a model is sharded, and its gradients reduced."""

    accumulate: int = 1
    factor: float | None = None
    compute: torch.dtype | None = None
    """In which gradients are reduced, too."""


def follow_native(rank: int, count: int, ports: list[int], case: ShardedCase) -> int:
    """Train a model with our hooks and one with native HSDP; compare gradients and parameters each time."""
    torch.manual_seed(1)
    mesh = replicated(count // SHARDS, SHARDS)
    ours = ShardedNet()
    policy = MixedPrecisionPolicy(param_dtype=case.compute)
    theirs = shard(copy.deepcopy(ours), mesh, mp_policy=policy)
    shard(ours, mesh["dp_shard"], mp_policy=policy)
    for unit in (one for model in (ours, theirs) for one in model.modules()):
        if case.factor is not None and isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(case.factor)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (ours, theirs)]
    compared = 0
    reduced: list[int] = []
    with hooked(ours, rank, count // SHARDS, ports) as (hooks, _):
        hooks.on_reduced = reduced.append
        for iteration in range(4):
            for part in range(case.accumulate):
                for model in (ours, theirs):
                    model.set_requires_gradient_sync(part == case.accumulate - 1)  # type: ignore[operator]
                    batch = rows(rank, iteration, part)
                    model(batch, more=iteration == 2).square().mean().backward()
            assert reduced == [FIRST_ITERATION + one for one in range(iteration + 1)]
            for mine, native in zip(ours.parameters(), theirs.parameters(), strict=True):
                gradient, expected = local(mine.grad), local(native.grad)
                assert (gradient is None) == (expected is None)
                if gradient is not None and expected is not None:
                    assert torch.equal(gradient, expected)
                    compared += gradient.numel()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return compared


@pytest.mark.parametrize(
    "case",
    [
        ShardedCase(),
        pytest.param(ShardedCase(accumulate=3), marks=pytest.mark.slow),
        pytest.param(ShardedCase(factor=float(SHARDS)), marks=pytest.mark.slow),
        pytest.param(ShardedCase(compute=torch.bfloat16), marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_native_hsdp(ranks: RankProcesses, case: ShardedCase) -> None:
    """Two replicas: a sum of two has the same bits in any order. With a factor, replicas are summed."""
    compared = ranks.run(4, follow_native, [free_port(), free_port()], case)
    assert min(compared) > 500


def place_shards(rank: int, count: int, file: str, groups: list[list[int]]) -> tuple[list[int], str]:
    """Return the ranks of `shard_mesh`, and the error if the job then has other DP groups."""
    data = job_data(groups=2, ranks=2)
    for described, members in zip(data["dp_groups"], [[0, 2], [1, 3]], strict=True):
        for member, number in zip(described["ranks"], members, strict=True):
            member["rank"] = number
    os.environ["CHECKMATE_JOB"] = f"{file}.{rank}"
    Path(f"{file}.{rank}").write_text(yaml.safe_dump(data))
    model = FsdpModel(shard(ShardedNet(), checkmate.shard_mesh("cpu")))
    place = membership.join(model)
    assert (place.group, place.position) == (rank % 2, rank // 2)
    for described, members in zip(data["dp_groups"], groups, strict=True):
        for member, number in zip(described["ranks"], members, strict=True):
            member["rank"] = number
    Path(f"{file}.{rank}").write_text(yaml.safe_dump(data))
    try:
        membership.join(model)
    except SessionError as error:
        return model.shard_ranks, str(error)
    return model.shard_ranks, ""


def test_the_mesh_of_shards_follows_the_dp_groups(ranks: RankProcesses, tmp_path: Path) -> None:
    told = ranks.run(4, place_shards, str(tmp_path / "job.yaml"), [[0, 1], [2, 3]])
    assert [shards for shards, _ in told] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for _, error in told:
        assert "dp_groups[0] has rank 0 (" in error and "with shard 0 of 2 and rank 1 (" in error
        assert "with shard 1 of 2, but the ranks of a DP group have replicas of one shard" in error


def clip(rank: int, count: int, ports: list[int]) -> tuple[float, bool]:
    """Clip; return the recorded factor, and whether it is the one that has multiplied the gradients."""
    torch.manual_seed(1)
    model = shard(ShardedNet(), replicated(count // SHARDS, SHARDS)["dp_shard"])
    with hooked(model, rank, count // SHARDS, ports) as (hooks, _):
        model(rows(rank, 0)).square().mean().backward()
        before = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]  # type: ignore[union-attr]
        factors: list[torch.Tensor] = []
        listener = ClipListener(hooks._parameters, lambda: None, lambda _, factor: factors.append(factor))
        checkmate.clip_grad_norm_(model.parameters(), 0.01)
        listener.close()
        after = [local(p.grad) for p in model.parameters() if p.grad is not None]
    assert type(factors[0]) is torch.Tensor and factors[0].dtype == torch.float32
    same = all(torch.equal(one * factors[0], two) for one, two in zip(before, after, strict=True))  # type: ignore[arg-type]
    return float(factors[0]), same and len(factors) == 1


def test_clipping_has_one_factor_on_all_ranks(ranks: RankProcesses) -> None:
    """That of the norm of the whole model, to the last bit."""
    told = ranks.run(4, clip, [free_port(), free_port()])
    assert len({factor for factor, _ in told}) == 1 and 0 < told[0][0] < 1
    assert all(same for _, same in told)


def lose_a_replica(rank: int, count: int, ports: list[int]) -> str:
    model = shard(ShardedNet(), replicated(count // SHARDS, SHARDS)["dp_shard"])
    with hooked(model, rank, count // SHARDS, ports) as (_, ring):
        model(rows(rank, 0)).sum().backward()
        model.zero_grad()
        loss = model(rows(rank, 1)).sum()
        if rank // SHARDS == 1:
            ring.abort()
            dist.barrier()
            return ""
        with pytest.raises(RingError) as raised:
            loss.backward()
        dist.barrier()
        return str(raised.value)


def test_backward_ends_when_a_replica_is_gone(ranks: RankProcesses) -> None:
    told = ranks.run(4, lose_a_replica, [free_port(), free_port()])
    assert "rank 1" in told[0] and "rank 1" in told[1]


class ReentrantNet(ShardedNet):
    """A backward within the backward for each block, at whose end not all gradients are there."""

    def forward(self, rows: torch.Tensor, *, more: bool = False) -> torch.Tensor:
        hidden = self.embedding(rows)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        out: torch.Tensor = self.head(hidden)
        return out


def refuse(rank: int, count: int, ports: list[int]) -> dict[str, str]:
    """Return the errors of backward, by what the script does."""
    told: dict[str, str] = {}
    mesh = replicated(count // SHARDS, SHARDS)["dp_shard"]
    for what in ("kept", "absent", "closed", "reentrant"):
        model = shard(ReentrantNet() if what == "reentrant" else ShardedNet(), mesh)
        with hooked(model, rank, count // SHARDS, ports) as (hooks, _):
            try:
                if what == "absent":
                    model(rows(rank, 0), more=rank >= SHARDS).sum().backward()
                else:
                    model(rows(rank, 0)).sum().backward()
                    if what == "closed":
                        model.zero_grad()
                        hooks.close()
                    model(rows(rank, 0)).sum().backward()
            except (RefusedError, RingError) as error:
                told[what] = str(error)
            dist.barrier()
    return told


def test_what_shadow_nodes_could_not_follow_is_refused(ranks: RankProcesses) -> None:
    told = ranks.run(4, refuse, [free_port(), free_port()])
    assert "has a .grad from before this backward" in told[0]["kept"]
    assert "set_requires_gradient_sync(False)" in told[3]["kept"]
    assert "sometimes.weight has no gradient on this rank, but on another" in told[0]["absent"]
    assert told[1]["reentrant"].startswith("blocks.1.0.weight has a .grad from before this backward")
    assert told[1]["reentrant"].endswith("checkpoint activations with use_reentrant=False")
    assert "Protection is closed" in told[2]["closed"]
