"""A sharded model as the training side sees it, and the settings of FSDP with which it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parallel import DistributedDataParallel

from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import local_of, sharded_like
from checkmate.training.checks import check_model
from checkmate.training.errors import RefusedError
from checkmate.training.gradients.buckets import GradientBuckets
from checkmate.training.gradients.fsdp_hooks import ShardedHooks
from checkmate.training.gradients.reducer import zero_buckets
from checkmate.training.gradients.staging import Staging
from checkmate.training.model.choosing import model_of
from checkmate.training.model.fsdp import FsdpReplica
from checkmate.training.record.buffers import Buffers
from checkmate.training.record.capture import Watched
from checkmate.training.start.install import install_optimizer, install_parameters
from checkmate.wire.layout import Layout, make_layout
from tests.support.training.alone import alone
from tests.support.training.sharded import ShardedNet, SplitNet, hybrid, replicated, shard, split


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with alone():
        yield


def sharded(**options: Any) -> Any:
    return shard(ShardedNet(), replicated(1, 1)["dp_shard"], **options)


def test_parameters_are_in_the_order_in_which_backward_ends_reversed() -> None:
    """The root's come first, because backward completes them last. Names are the script's."""
    model = model_of(sharded())
    assert isinstance(model, FsdpReplica)
    names = list(model.trained())
    assert names[:2] == ["scale", "embedding.weight"]
    assert names[2:5] == ["blocks.0.0.weight", "blocks.0.2.weight", "blocks.0.2.bias"]
    assert names[-2:] == ["sometimes.weight", "sometimes.bias"]
    assert sorted(model.kept_beside()) == ["blocks.0.0.bias", "seen"]
    assert model.state_names()["head.weight"] == "embedding.weight"
    described = {parameter.name: parameter for parameter in model.describe()}
    assert described["embedding.weight"].whole == (11, 6)
    assert described["embedding.weight"].offset == (0, 0)
    assert [(parameter.name, parameter.whole) for parameter in model.describe_frozen()] == [
        ("blocks.0.0.bias", (13,))
    ]


def test_whole_parameters_during_evaluation_are_not_taken_for_the_trained_ones() -> None:
    module = sharded()
    before = list(module.parameters())
    with torch.no_grad():
        module(torch.tensor([1, 2]))
    wrapped = model_of(module)
    assert {id(p) for p in wrapped.parameters().values()} == {id(p) for p in before}


def two_dimensions() -> nn.Module:
    return shard(ShardedNet(), hybrid(replicated(1, 1)))


def with_tensor_parallelism(change: Callable[[SplitNet], object] = lambda model: None) -> Any:
    model = split(SplitNet(), replicated(1, 1)["tp"])
    change(model)
    return model


def halved(model: SplitNet) -> None:
    """Replace a parameter of 6 elements by one of which this rank has 5."""
    mesh = replicated(1, 1)["tp"]
    part = DTensor.from_local(
        torch.ones(5), mesh, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,)
    )
    model.norm.weight = nn.Parameter(part)


def named_dimensions() -> nn.Module:
    mesh = replicated(1, 1)["dp_shard", "tp"]
    model = distribute_module(nn.Linear(3, 3), mesh)
    dimensions = getattr(fsdp, "DataParallelMeshDims", None)
    if dimensions is None:
        pytest.skip("PyTorch has them since 2.12")
    fully_shard(model, mesh=mesh, dp_mesh_dims=dimensions(shard="dp_shard"))
    return model


def not_sharded() -> nn.Module:
    model = ShardedNet()
    fully_shard(model, mesh=replicated(1, 1)["dp_shard"], ignored_params={model.scale})
    return model


def frozen() -> nn.Module:
    model: nn.Module = sharded().requires_grad_(False)
    return model


def with_setting(name: str, value: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = sharded()
        getattr(model, name)(value)
        configured: nn.Module = model
        return configured

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (two_dimensions, r"on the mesh \('dp_replicate', 'dp_shard'\).*mesh=checkmate.shard_mesh\("),
        (
            lambda: shard(with_tensor_parallelism(), hybrid(replicated(1, 1))),
            r"on the mesh \('dp_replicate', 'dp_shard', 'tp'\).*mesh=checkmate.shard_mesh\(",
        ),
        (
            lambda: shard(with_tensor_parallelism(halved), replicated(1, 1)["dp_shard"]),
            r"^norm.weight: this rank has \(5,\) of \(6,\), but .* PyTorch would give it \(6,\): split",
        ),
        (
            named_dimensions,
            "^FSDPLinear: dp_mesh_dims .* the dimension of the shards, mesh=checkmate.shard_mesh",
        ),
        (frozen, "no parameter of the model needs a gradient"),
        (not_sharded, "^scale is not sharded.*leave it out of ignored_params"),
        (with_setting("set_force_sum_reduction_for_comms", True), "divides gradients after their reduction"),
        (with_setting("set_gradient_divide_factor", 2.0), "only some .*, blocks.0 has not: call it on all"),
        (
            lambda: sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)),
            r"of torch.float16 after their reduction.*reduce_dtype=torch.float32",
        ),
    ],
)
def test_settings_with_which_shadow_nodes_would_get_other_gradients(
    make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        model_of(make())


def test_ddp_beside_tensor_parallelism_is_refused_with_what_works() -> None:
    """DDP accepts such a model only with `device_mesh`."""
    mesh = replicated(1, 1)
    ddp = DistributedDataParallel(with_tensor_parallelism(), device_mesh=mesh["dp_replicate"])
    with pytest.raises(RefusedError, match=r"in place of DDP, apply fully_shard .* whose size may be 1$"):
        model_of(ddp)
    model_of(shard(with_tensor_parallelism(), mesh["dp_shard"])).describe()


def test_a_pytorch_without_the_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sharded()
    monkeypatch.delattr(FSDPModule, "set_all_reduce_hook")
    with pytest.raises(RefusedError, match="can't be followed with fully_shard: use 2.7 or newer"):
        model_of(module)


class OneRank:
    """A reducer of one rank: its gradients are the average."""

    repairs = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.tensors = zero_buckets(layout, torch.device("cpu"))

    def staging(self, device: torch.device, on_error: object) -> Staging:
        return Staging()

    def open(self, on_done: Callable[[int], None], on_error: object) -> None:
        self.submit = on_done

    def ends(self) -> dict[tuple[int, int], int]:
        return {}

    def is_acknowledged(self, ends: object) -> bool:
        return True

    def give_up(self) -> None:
        """Do nothing."""

    def close(self) -> None: ...


def test_another_hook_and_a_scaler_are_refused() -> None:
    module = sharded()
    model = model_of(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    check_model(Watched(model, optimizer))
    with pytest.raises(RefusedError, match="scaler= is not supported with a sharded model"):
        check_model(Watched(model, optimizer, scaler=torch.amp.GradScaler("cpu")))
    assert isinstance(model, FsdpReplica)
    layout = make_layout(model.describe(), 1)
    buckets = GradientBuckets(layout, list(model.trained().values()), OneRank(layout), 0)
    hooks = ShardedHooks(model, buckets)
    hooks.register()
    with pytest.raises(RefusedError, match=r"has the all-reduce hook ShardedHooks.scattered"):
        check_model(Watched(model, optimizer))
    hooks.close()
    check_model(Watched(model, optimizer))
    module.blocks[0].set_all_reduce_hook(print)
    with pytest.raises(RefusedError, match=r"^blocks.0 already has the all-reduce hook print"):
        check_model(Watched(model, optimizer))


def test_a_frozen_chunk_that_changes_is_recorded_as_it_is_here() -> None:
    """PyTorch counts changes of a DTensor at the DTensor, and not at its local part."""
    module = sharded()
    frozen = module.blocks[0][0].bias
    buffers = Buffers(model_of(module).kept_beside, everything=False)
    assert set(buffers.take()) == {"seen"}
    with torch.no_grad():
        frozen.add_(1)
    changes = buffers.take()
    assert set(changes) == {"seen", "blocks.0.0.bias"}
    assert torch.equal(changes["blocks.0.0.bias"](), frozen.to_local())
    assert type(changes["blocks.0.0.bias"]()) is torch.Tensor


def test_installed_state_is_sharded_like_its_parameters() -> None:
    """As the optimizer itself would create it; its steps would fail otherwise."""
    origin, target = sharded(), sharded()
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (origin, target)]
    for parameter in origin.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizers[0].step()
    names = model_of(origin).trained()
    states = {
        number: (
            local_of(parameter).clone(),
            {name: local_of(value).clone() for name, value in optimizers[0].state[parameter].items()},
        )
        for number, parameter in enumerate(names.values())
    }
    installed = list(model_of(target).trained().values())
    install_parameters(installed, states)
    numbers = {parameter: number for number, parameter in enumerate(installed)}
    install_optimizer(optimizers[1], numbers, states, [], pb.IterationRecord())
    for module, optimizer in zip((origin, target), optimizers, strict=True):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    for source, their in zip(names.values(), installed, strict=True):
        assert torch.equal(local_of(source), local_of(their))
        for name, value in optimizers[0].state[source].items():
            assert torch.equal(local_of(value), local_of(optimizers[1].state[their][name]))
            assert type(value) is type(optimizers[1].state[their][name])


def test_installed_state_stays_on_the_cpu_with_an_offloaded_parameter() -> None:
    """Its mesh is of GPUs, to which `from_local` would move it. A mesh of `meta` devices stands for them."""
    mesh = DeviceMesh("meta", [0])
    local, stored = torch.zeros(4, 3), torch.arange(12.0, dtype=torch.float64).view(4, 3)
    described = TensorMeta(local.shape, local.stride(), local.dtype)
    construct: Any = DTensor
    parameter = construct(local, DTensorSpec(mesh, (Shard(0),), described), requires_grad=False)
    installed = sharded_like(parameter, stored)
    assert isinstance(installed, DTensor)
    assert (installed.device_mesh, installed.placements) == (mesh, (Shard(0),))
    assert torch.equal(local_of(installed), stored)
