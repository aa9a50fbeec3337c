"""The hooks of a `fully_shard`ed model, in real processes: `.grad` is native HSDP's, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.ring.place import RingError
from checkmate.state import local_of
from checkmate.training.errors import RefusedError
from checkmate.training.gradients.staging import Staging, Tensors
from testbed.ports import free_port
from tests.support.training.rank_processes import RankProcesses, failing_backward, join_nccl
from tests.support.training.sharded import (
    FIRST_ITERATION,
    ShardedNet,
    SplitNet,
    hooked,
    hybrid,
    replicated,
    rows,
    shard,
    split,
)

SHARDS = 2


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's part of each gradient that is there."""
    gradients = [gradient.grad for gradient in model.parameters() if gradient.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


@dataclass(frozen=True)
class ShardedCase:
    """How a model is sharded, and its gradients reduced."""

    accumulate: int = 1
    factor: float | None = None
    compute: torch.dtype | None = None
    """In which gradients are reduced, too."""
    stored_type: torch.dtype = torch.float32
    """The parameters' own type."""
    reduced: torch.dtype | None = None
    checkpointed: bool = False
    """Whether activations are checkpointed."""
    compiled: bool = False
    """Whether blocks are compiled, as far as autograd's graphs."""
    reused: bool = False
    """Whether a block is used twice in each forward."""
    offloaded: bool = False
    """Whether FSDP keeps parameters and gradients on the CPU."""
    tensor: int = 1
    """Over how many ranks tensor parallelism splits parameters."""
    store: str = ""
    """If given, ranks share a GPU, and meet at this file for NCCL."""

    @property
    def device(self) -> str:
        return "cuda" if self.store else "cpu"


class TwiceNet(ShardedNet):
    """A block that is used twice, whose gradients FSDP reduces once."""

    def forward(self, rows: torch.Tensor, *, more: bool = False) -> torch.Tensor:
        hidden = self.embedding(rows)
        out: torch.Tensor = self.head(self.blocks[0](self.blocks[0](hidden)))
        return out


def prepared(case: ShardedCase) -> ShardedNet | SplitNet:
    """Return the model before it is split and sharded."""
    if case.tensor > 1:
        return SplitNet()
    model = (TwiceNet() if case.reused else ShardedNet()).to(case.stored_type)
    for number, block in enumerate(model.blocks):
        if case.checkpointed:
            model.blocks[number] = checkpoint_wrapper(block)
        if case.compiled:
            block.compile(backend="aot_eager")
    return model


def follow_native(rank: int, count: int, ports: list[int], case: ShardedCase) -> int:
    """Train a model with our hooks and one with native HSDP; compare gradients and parameters each time."""
    if case.store:
        join_nccl(rank, count, case.store)
    torch.manual_seed(1)
    mesh = replicated(2, count // (2 * case.tensor), case.tensor, case.device)
    plain = [prepared(case)]
    plain.append(copy.deepcopy(plain[0]))
    hooked_model, native_model = (
        split(module, mesh["tp"]) if isinstance(module, SplitNet) else module for module in plain
    )
    policy = MixedPrecisionPolicy(param_dtype=case.compute, reduce_dtype=case.reduced)
    offload = CPUOffloadPolicy(pin_memory=bool(case.store)) if case.offloaded else OffloadPolicy()
    shard(native_model, hybrid(mesh), mp_policy=policy, offload_policy=offload)
    shard(hooked_model, mesh["dp_shard"], mp_policy=policy, offload_policy=offload)
    for unit in (module for model in (hooked_model, native_model) for module in model.modules()):
        if case.factor is not None and isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(case.factor)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (hooked_model, native_model)]
    compared = 0
    reduced: list[int] = []
    with hooked(hooked_model, rank, 2, ports) as (hooks, _):
        hooks.on_reduced = reduced.append
        for iteration in range(4):
            for part in range(case.accumulate):
                for model in (hooked_model, native_model):
                    assert isinstance(model, FSDPModule)
                    model.set_requires_gradient_sync(part == case.accumulate - 1)
                    batch = rows(rank // case.tensor, iteration, part).to(case.device)
                    model(batch, more=iteration == 2).square().mean().backward()
            assert reduced == [FIRST_ITERATION + module for module in range(iteration + 1)]
            assert [module.grad is None for module in hooked_model.parameters()] == [
                module.grad is None for module in native_model.parameters()
            ]
            for gradient, expected in zip(
                gradients_of(hooked_model), gradients_of(native_model), strict=True
            ):
                assert torch.equal(gradient, expected)
                compared += gradient.numel()
            del gradient, expected
            storages = [StorageWeakRef(module.untyped_storage()) for module in gradients_of(hooked_model)]  # type: ignore[no-untyped-call]
            for model in (hooked_model, native_model) if case.store else ():
                checkmate.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert storages and all(module.expired() for module in storages)  # type: ignore[no-untyped-call]
    return compared


@pytest.mark.parametrize(
    "case",
    [
        ShardedCase(),
        ShardedCase(accumulate=3),
        ShardedCase(factor=float(SHARDS)),
        ShardedCase(compute=torch.bfloat16),
        ShardedCase(stored_type=torch.bfloat16, reduced=torch.float32),
        ShardedCase(stored_type=torch.bfloat16),
        ShardedCase(checkpointed=True),
        pytest.param(ShardedCase(compiled=True), marks=pytest.mark.slow),
        ShardedCase(reused=True),
        ShardedCase(offloaded=True),
        ShardedCase(offloaded=True, stored_type=torch.bfloat16, reduced=torch.float32),
    ],
)
def test_gradients_are_those_of_native_hsdp(ranks: RankProcesses, case: ShardedCase) -> None:
    """Two replicas: a sum of two has the same bits in any order. With a factor, replicas are summed."""
    compared = ranks.run(4, follow_native, [free_port(), free_port()], case)
    assert min(compared) > 400


def follow_with_staging_that_keeps(rank: int, count: int, ports: list[int]) -> int:
    """Train as above; what a staging calls when gradients are there stays alive, as in a waiting thread."""
    callbacks: list[Callable[[], None]] = []
    copy_in = Staging.copy_in

    def keep(self: Staging, gradients: Tensors, flats: Tensors, ready: Callable[[], None]) -> None:
        callbacks.append(ready)
        copy_in(self, gradients, flats, ready)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "copy_in", keep)
        compared = follow_native(rank, count, ports, ShardedCase())
    assert callbacks
    return compared


def test_a_staging_that_waits_holds_no_gradient(ranks: RankProcesses) -> None:
    """Else one would take memory of a GPU during the next forward."""
    assert min(ranks.run(4, follow_with_staging_that_keeps, [free_port(), free_port()])) > 400


@pytest.mark.skipif(not torch.cuda.is_available(), reason="gradients on a GPU need a CUDA device")
@pytest.mark.parametrize(
    "case",
    [
        ShardedCase(accumulate=3),
        ShardedCase(factor=float(SHARDS)),
        ShardedCase(compute=torch.bfloat16, reduced=torch.float32),
        ShardedCase(stored_type=torch.bfloat16, reduced=torch.float32),
        ShardedCase(offloaded=True, accumulate=3),
        ShardedCase(offloaded=True, stored_type=torch.bfloat16, reduced=torch.float32),
    ],
)
def test_gradients_on_a_gpu_are_those_of_native_hsdp(
    ranks: RankProcesses, tmp_path: Path, case: ShardedCase
) -> None:
    shared = replace(case, store=str(tmp_path / "store"))
    assert min(ranks.run(4, follow_native, [free_port(), free_port()], shared)) > 400


@pytest.mark.parametrize(
    "shards", [pytest.param(1, id="2x1x2"), pytest.param(2, id="2x2x2", marks=pytest.mark.slow)]
)
def test_gradients_beside_tensor_parallelism_are_those_of_native_hsdp(
    ranks: RankProcesses, shards: int
) -> None:
    ports = [free_port() for _ in range(2 * shards)]
    compared = ranks.run(4 * shards, follow_native, ports, ShardedCase(tensor=2))
    assert min(compared) > 400


class ElsewhereTorch:
    """PyTorch for FSDP's reduction, whose gradients are copied, as from a GPU to the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def as_strided(*arguments: Any, **options: Any) -> torch.Tensor:
        return torch.as_strided(*arguments, **options).clone()


class SilentNet(nn.Module):
    """In the first iteration, its head is zero, and so are all other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(rows).tanh())
        return out


def offload_narrow(rank: int, count: int, port: int) -> bool:
    """Return whether offloaded bf16 gradients of all iterations are those of a model that is not sharded."""
    torch.manual_seed(1)
    alone = SilentNet().bfloat16()
    model = copy.deepcopy(alone)
    for unit in (model.body, model):
        fully_shard(
            unit,
            mesh=replicated(count, 1)["dp_shard"],
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (alone, model)]
    same = []
    with pytest.MonkeyPatch.context() as patch, hooked(model, rank, count, [port]):
        patch.setattr(_fsdp_collectives, "torch", ElsewhereTorch())
        for _ in range(3):
            for module in (alone, model):
                (module(torch.ones(4, 6).bfloat16()) - 1).square().mean().backward()
            pairs = zip(gradients_of(alone), gradients_of(model), strict=True)
            same += [torch.equal(module, wide) for module, wide in pairs]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return len(same) == 9 and all(same)


def test_offloaded_narrow_gradients_have_their_places_in_the_flat_tensor(ranks: RankProcesses) -> None:
    """A copy on the CPU does not tell them: it begins at 0. Zeros in the first iteration prove nothing."""
    assert all(ranks.run(2, offload_narrow, free_port()))


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
        return failing_backward(loss)


def test_backward_ends_when_a_replica_is_gone(ranks: RankProcesses) -> None:
    errors = ranks.run(4, lose_a_replica, [free_port(), free_port()])
    assert "rank 1" in errors[0] and "rank 1" in errors[1]


def begin_with_nan(rank: int, count: int, ports: list[int]) -> bool:
    """Return whether all gradients of narrow parameters are NaN after a first loss that is."""
    model = ShardedNet().to(torch.bfloat16)
    shard(model, replicated(2, 1)["dp_shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    with hooked(model, rank, 2, ports):
        (model(rows(rank, 0)).sum() * float("nan")).backward()
        gradients = [local_of(p.grad) for p in model.parameters() if p.grad is not None]
        return len(gradients) > 3 and all(bool(gradient.isnan().any()) for gradient in gradients)


def test_nan_in_the_first_iteration_is_a_gradient_like_others(ranks: RankProcesses) -> None:
    assert ranks.run(2, begin_with_nan, [free_port()]) == [True, True]


class NarrowNet(nn.Module):
    """A unit of one row, which FSDP reduces after all others because its input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.beside = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(rows) + self.beside(rows)
        return out


def reduce_an_empty_unit_last(rank: int, count: int, ports: list[int]) -> int:
    torch.manual_seed(1)
    model, mesh = NarrowNet(), replicated(count // SHARDS, SHARDS)["dp_shard"]
    for unit in (model.beside, model):
        fully_shard(unit, mesh=mesh)
    with hooked(model, rank, count // SHARDS, ports) as (hooks, _):
        for _ in range(2):
            model(torch.ones(3, 6)).square().mean().backward()
            model.zero_grad()
        return hooks.buckets.iteration


def test_a_unit_without_elements_on_a_rank_does_not_begin_an_iteration(ranks: RankProcesses) -> None:
    iterations = ranks.run(4, reduce_an_empty_unit_last, [free_port(), free_port()])
    assert iterations == [FIRST_ITERATION + 1] * 4


class ReentrantNet(ShardedNet):
    """A backward within the backward for each block, at whose end not all gradients are there."""

    def forward(self, rows: torch.Tensor, *, more: bool = False) -> torch.Tensor:
        hidden = self.embedding(rows)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        out: torch.Tensor = self.head(hidden)
        return out


def change(change_name: str, model: nn.Module) -> None:
    """Change a setting of FSDP's between two iterations."""
    if change_name == "unfrozen":
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            if change_name == "factor":
                unit.set_gradient_divide_factor(2.0)
            elif change_name == "forced":
                unit.set_force_sum_reduction_for_comms(True)
            elif change_name == "hook":
                unit.set_all_reduce_hook(lambda flat: None)
                return


def refuse(rank: int, count: int, ports: list[int]) -> dict[str, str]:
    """Return the errors of backward, by what the script does."""
    errors: dict[str, str] = {}
    mesh = replicated(count // SHARDS, SHARDS)["dp_shard"]
    for change_name in ("kept", "absent", "closed", "reentrant", "factor", "forced", "hook", "unfrozen"):
        model = shard(ReentrantNet() if change_name == "reentrant" else ShardedNet(), mesh)
        with hooked(model, rank, count // SHARDS, ports) as (hooks, _):
            try:
                if change_name == "absent":
                    model(rows(rank, 0), more=rank >= SHARDS).sum().backward()
                else:
                    model(rows(rank, 0)).sum().backward()
                    if change_name != "kept":
                        model.zero_grad()
                    if change_name == "closed":
                        hooks.close()
                    change(change_name, model)
                    model(rows(rank, 0)).sum().backward()
            except (RefusedError, RingError) as error:
                errors[change_name] = str(error)
            dist.barrier()
    return errors


def test_what_shadow_nodes_could_not_follow_is_refused(ranks: RankProcesses) -> None:
    errors = ranks.run(4, refuse, [free_port(), free_port()])
    assert "has a .grad from before this backward" in errors[0]["kept"]
    assert "set_requires_gradient_sync(False)" in errors[3]["kept"]
    assert "sometimes.weight has no gradient on this rank, but on another" in errors[0]["absent"]
    assert errors[1]["reentrant"].startswith("blocks.1.0.weight has a .grad from before this backward")
    assert errors[1]["reentrant"].endswith("checkpoint activations with use_reentrant=False")
    assert "Protection is closed" in errors[2]["closed"]
    assert errors[0]["factor"].startswith("set_gradient_divide_factor was called after checkmate.protect")
    assert "set_force_sum_reduction_for_comms(True), FSDP divides gradients after" in errors[1]["forced"]
    assert "got requires_grad=True after checkmate.protect" in errors[3]["unfrozen"]
    assert errors[2]["hook"].startswith("FSDPShardedNet got another all-reduce hook after checkmate.protect")
