"""The parts of a sharded model that ranks have, and how these agree with the job's DP groups."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import checkmate
from checkmate.state import local_of
from checkmate.training.errors import RefusedError, SessionError
from checkmate.training.model.fsdp import FsdpReplica
from checkmate.training.start import places
from checkmate.training.start.named_job import named_job
from testbed.jobs import job_data
from tests.support.job_files import meshed, write
from tests.support.training.rank_processes import RankProcesses
from tests.support.training.sharded import ShardedNet, SplitNet, replicated, shard, split


def shard_bounds(rank: int, count: int) -> tuple[int, int]:
    """Compare each chunk with its place in the whole parameter; return that of the embedding's rows."""
    torch.manual_seed(1)
    model = SplitNet()
    whole = copy.deepcopy(model).state_dict()
    mesh = replicated(1, 2, 2)
    wrapped = FsdpReplica(shard(split(model, mesh["tp"]), mesh["dp_shard"]))
    chunks = {chunk.name: chunk for chunk in wrapped.describe()}
    for name, parameter in wrapped.trained().items():
        chunk = chunks[name]
        assert chunk.whole == tuple(whole[name].shape)
        place = tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.shape, strict=True))
        assert torch.equal(whole[name][place], local_of(parameter)), name
    return chunks["embedding.weight"].offset[0], chunks["embedding.weight"].shape[0]


def test_chunks_are_in_their_places_beside_tensor_parallelism(ranks: RankProcesses) -> None:
    """Of tensor parallelism's 6 and 5 rows, shard 0 has the first 3, and shard 1 the others."""
    assert ranks.run(4, shard_bounds) == [(0, 3), (6, 3), (3, 3), (9, 2)]


def place_parts(rank: int, count: int, file: str) -> tuple[list[int], int, int]:
    """Return the ranks of this one's replica, its DP group, and its position there."""
    os.environ["CHECKMATE_JOB"] = file
    mesh = checkmate.job_mesh("cpu")
    model = FsdpReplica(shard(split(SplitNet(), mesh["tp"]), mesh["dp_shard"]))
    place = places.join(model, named_job())
    return model.shard_ranks, place.group, place.position


def test_the_mesh_of_the_job_is_for_tensor_parallelism_too(ranks: RankProcesses, tmp_path: Path) -> None:
    file = write(tmp_path, meshed(replicate=2, tp=2, nodes=2))
    places = ranks.run(4, place_parts, str(file))
    assert places == [([0, 1], 0, 0), ([0, 1], 1, 0), ([2, 3], 0, 1), ([2, 3], 1, 1)]


def place_shards(rank: int, count: int, file: str, groups: list[list[int]]) -> tuple[list[int], str]:
    """Return the ranks of `shard_mesh`, and the error if the job then has other DP groups."""
    data = job_data(groups=2, ranks=2)
    for described, members in zip(data["dp_groups"], [[0, 2], [1, 3]], strict=True):
        for member, number in zip(described["ranks"], members, strict=True):
            member["rank"] = number
    os.environ["CHECKMATE_JOB"] = f"{file}.{rank}"
    Path(f"{file}.{rank}").write_text(yaml.safe_dump(data))
    model = FsdpReplica(shard(ShardedNet(), checkmate.shard_mesh("cpu")))
    place = places.join(model, named_job())
    assert (place.group, place.position) == (rank % 2, rank // 2)
    for described, members in zip(data["dp_groups"], groups, strict=True):
        for member, number in zip(described["ranks"], members, strict=True):
            member["rank"] = number
    Path(f"{file}.{rank}").write_text(yaml.safe_dump(data))
    try:
        places.join(model, named_job())
    except SessionError as error:
        return model.shard_ranks, str(error)
    return model.shard_ranks, ""


def test_the_mesh_of_shards_follows_the_dp_groups(ranks: RankProcesses, tmp_path: Path) -> None:
    places = ranks.run(4, place_shards, str(tmp_path / "job.yaml"), [[0, 1], [2, 3]])
    assert [shards for shards, _ in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for _, error in places:
        assert "DP group 0 has rank 0 (" in error and "with part 0 of 2 of the model and rank 1 (" in error
        assert "with part 1 of 2, but the ranks of a DP group have replicas of one part" in error


def test_with_copies_by_hosts_shards_alone_are_no_mesh_of_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would reduce over the replicas, each of which would train a model of its own."""
    nodes = [{"id": 0, "mgmt": "shadow0:7000"}]
    data = {"job": "x", "copies": "host", "mesh": {"dp_replicate": 2, "dp_shard": 2}, "shadow_nodes": nodes}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    monkeypatch.setenv("CHECKMATE_JOB", str(file))
    with pytest.raises(
        SessionError, match=r'both dimensions, .*job_mesh\("cpu"\)\["dp_replicate", "dp_shard"\]'
    ):
        checkmate.shard_mesh("cpu")


def add_factor(rank: int, count: int, file: str) -> str:
    """Return the error if only some replicas have a factor."""
    os.environ["CHECKMATE_JOB"] = file
    model = shard(ShardedNet(), checkmate.shard_mesh("cpu"))
    for unit in model.modules():
        if isinstance(unit, FSDPModule) and rank >= 2:
            unit.set_gradient_divide_factor(1.0)
    with pytest.raises(SessionError) as excinfo:
        places.join(FsdpReplica(model), named_job())
    return str(excinfo.value)


def test_replicas_have_to_divide_gradients_alike(ranks: RankProcesses, tmp_path: Path) -> None:
    file = write(tmp_path, meshed(replicate=2, shard=2, nodes=2))
    for error in ranks.run(4, add_factor, str(file)):
        assert error.startswith("DP group 0 (dp_shard 0): only one of rank 0 (")
        assert error.endswith("has set_gradient_divide_factor: call it on all ranks, or on none")


def shard_too_small_a_model(rank: int, count: int) -> str:
    with pytest.raises(RefusedError) as excinfo:
        FsdpReplica(fully_shard(nn.Linear(5, 6), mesh=replicated(1, count)["dp_shard"]))  # 2, 2, 2 and 0 rows
    return str(excinfo.value)


def test_all_ranks_name_a_shard_without_elements(ranks: RankProcesses) -> None:
    for error in ranks.run(4, shard_too_small_a_model):
        assert error.startswith("no parameter has a part on the last of 4 shards") and "fewer shards" in error
