"""Checkpoints of a sharded job, loaded by PyTorch alone into native HSDP of other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim.lr_scheduler import LambdaLR

from checkmate.consolidate import disk
from checkmate.consolidate.assemble import checkpoint, keyed_for_torchtitan
from checkmate.consolidate.snapshot import Snapshot
from checkmate.state import StateError
from tests.support.checkpoints import DiskRun
from tests.support.training.lab import equal
from tests.support.training.rank_processes import RankProcesses
from tests.support.training.resharded import ITERATION, MeshCase, full, resume, save_and_load, unpacked
from tests.support.training.sharded import ShardedNet, hybrid, replicated, shard

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def load_natively(rank: int, count: int, shape: tuple[int, int], path: str, *, flat: bool) -> tuple[Any, Any]:
    """Load into a model of a mesh (replicas, shards), as torchtitan does if `flat`; return all of it."""
    torch.manual_seed(3)
    model = ShardedNet()
    if count > 1:
        shard(model, hybrid(replicated(*shape)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.3)
    options = FLAT if flat else StateDictOptions()
    weights = get_model_state_dict(model)
    states: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    groups = {} if flat else {"param_groups": states.pop("param_groups")}
    targets = {**weights, "optimizer": states} if flat else {"model": weights, "optimizer": states}
    load(targets, checkpoint_id=path)
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, states | groups, options=options)
    optimizer_state = {
        name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state
    }
    if flat:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    return full(model.state_dict()), full(optimizer_state)


@pytest.mark.slow
@pytest.mark.timeout(300)  # eight processes
def test_two_by_four_loads_anywhere(ranks: RankProcesses, tmp_path: Path) -> None:
    """With our keys and with torchtitan's."""
    model, states = save_and_load(tmp_path / "whole", "dcp")
    case = MeshCase(2, 4)
    resumptions = ranks.run(case.ranks, resume, case, str(tmp_path / "whole"))
    groups = tuple(unpacked(*resumptions[number][2]) for number in range(case.shards))
    document = checkpoint(Snapshot(case.job(), "run", ITERATION, groups), by_name=True)
    disk.save(document, tmp_path / "ours", "dcp")
    disk.save(keyed_for_torchtitan(document), tmp_path / "titan", "torchtitan")
    states_by_name = {
        name: states[n] for n, (name, _) in enumerate(ShardedNet().named_parameters()) if n in states
    }
    trained = {name: entries for name, entries in states_by_name.items() if name != "blocks.0.0.bias"}
    for shape in ((4, 2), (8, 1), (1, 8), (1, 1)):
        for path, flat in (("ours", False), ("titan", True)):
            count = shape[0] * shape[1]
            for weights, optimizer_state in ranks.run(count, run_load, shape, str(tmp_path / path), flat):
                assert equal(weights, model), shape
                assert equal(optimizer_state, trained), shape


def run_load(rank: int, count: int, shape: tuple[int, int], path: str, flat: bool) -> tuple[Any, Any]:
    return load_natively(rank, count, shape, path, flat=flat)


def test_torchtitans_keys_are_those_of_torch_itself(tmp_path: Path) -> None:
    """What torch flattens, the scheduler, and the entries of `extra()` of all ranks."""
    run = DiskRun()
    run.optimizer.param_groups[0]["params"].pop()  # a frozen one, which torch's functions don't expect
    document = checkpoint(run.snapshot(), by_name=True)
    for rank in document["extra"]:
        document["extra"][rank] = {
            "train_state": {"step": 3},
            "dataloader": {f"dp_rank_{rank}": b"x", "world_size": 3},
        }
    keyed = keyed_for_torchtitan(document)
    torchs = get_optimizer_state_dict(run.model, run.optimizer, options=FLAT)
    assert equal(dict(sorted(keyed.pop("optimizer").items())), dict(sorted(torchs.items())))
    scheduler = LambdaLR(run.optimizer, lambda step: 1.0)
    assert keyed.pop("lr_scheduler") == run.scheduler.state_dict() != scheduler.state_dict()
    assert keyed.pop("train_state") == {"step": 3}
    assert keyed.pop("dataloader") == {**{f"dp_rank_{rank}": b"x" for rank in range(3)}, "world_size": 3}
    assert equal(keyed, dict(run.model.state_dict()))
    disk.save(keyed_for_torchtitan(document), tmp_path / "c", "torchtitan")
    with pytest.raises(
        disk.DiskError, match="it has torchtitan's keys; consolidate with --format dcp writes"
    ):
        disk.load(tmp_path / "c")


def test_stages_of_a_pipeline_are_one_for_torchtitan() -> None:
    first = checkpoint(DiskRun().snapshot(), by_name=True)
    second = {
        **first,
        "model": {f"more.{name}": tensor for name, tensor in first["model"].items()},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": ["more.w"]}]},
    }
    keyed = keyed_for_torchtitan({"group0": first, "group1": second})
    assert {"head.weight", "more.head.weight"} <= keyed.keys()
    assert keyed["optimizer"]["param_groups.more.w.lr"] == 0.1
    assert "state.norm.bias.step" in keyed["optimizer"]
    with pytest.raises(StateError, match="^two pipeline stages have count|embedding.weight"):
        keyed_for_torchtitan({"group0": first, "group1": first})
