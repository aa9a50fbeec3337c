"""Jobs whose ranks are a mesh: groups in torch's order, their hosts, NICs and shadow nodes, and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from checkmate.job import checks, editor_schema
from checkmate.job.boundaries import first_shadow_ids
from checkmate.job.files import JobError, read_job
from checkmate.job.mesh import coordinates, group_name, replica_groups, sizes
from checkmate.job.mesh_groups import RULE, serving
from checkmate.job.placing import place
from testbed.jobs import job_data
from tests.support.cli import invoke
from tests.support.job_files import faults, interface, meshed, write

EDITORS = Draft202012Validator(editor_schema.of_job())


def test_groups_are_the_replicate_lines_of_torchs_mesh(tmp_path: Path) -> None:
    data = meshed(2, 3, 2, 2, gpus=4, nics=2, nodes=3)
    assert list(EDITORS.iter_errors(data)) == []
    job = read_job(write(tmp_path, data))
    ranks = torch.arange(24).view(2, 3, 2, 2)  # as init_device_mesh lays them out
    for index, group in enumerate(job.dp_groups):
        at = coordinates(job, index)
        expected = ranks[at["pp"], :, at["dp_shard"], at["tp"]].tolist()
        assert [rank.rank for rank in group.ranks] == expected
        assert [rank.host for rank in group.ranks] == [f"gpu{number // 4}" for number in expected]
        nics = [number % 4 // 2 for number in expected]
        assert [rank.nic for rank in group.ranks] == nics, "two GPUs share one"
    assert sorted(rank.rank for group in job.dp_groups for rank in group.ranks) == [*range(24)]
    assert [group_name(job, index) for index in (0, 5)] == [
        "0 (pp 0, dp_shard 0, tp 0)",
        "5 (pp 1, dp_shard 0, tp 1)",
    ]


def test_groups_on_the_same_nics_have_shadow_ids_of_their_own(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, meshed(1, 2, 8, gpus=8, nodes=2)))
    assert [group.shadow_nodes for group in job.dp_groups] == [(0,)] * 4 + [(1,)] * 4
    assert first_shadow_ids(job) == tuple(range(8))
    assert group_name(job, 3) == "3 (dp_shard 3)"
    alone = read_job(write(tmp_path, meshed(1, 2, 8, gpus=8, nics=8, nodes=2)))
    assert first_shadow_ids(alone) == (0,) * 8


def test_replicas_on_a_host_have_a_group_for_each_place_there(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, meshed(2, 6, gpus=2, nodes=4)))
    members = [[rank.rank for rank in group.ranks] for group in job.dp_groups]
    assert members == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert [rank.host for rank in job.dp_groups[3].ranks] == ["gpu3", "gpu4", "gpu5"]
    assert [group.shadow_nodes for group in job.dp_groups] == [(0,), (1,), (2,), (3,)]
    assert [replica_groups(job, group) for group in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert group_name(job, 3) == "3 (pp 1, local_rank 1)"
    assert sizes(job) == " (pp 2 x local_rank 2)"
    alone = read_job(write(tmp_path, meshed(1, 4, gpus=1)))
    assert [len(group.ranks) for group in alone.dp_groups] == [4] and replica_groups(alone, 0) == (0,)
    assert coordinates(alone, 0) == {"pp": 0, "dp_shard": 0, "tp": 0}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4))
def test_shadow_nodes_are_divided_by_the_rule(groups: int, nodes: int, replicas: int) -> None:
    replicas = min(replicas, nodes)
    nodes_by_group = [serving(group, groups, nodes, replicas) for group in range(groups)]
    for group, serving_nodes in enumerate(nodes_by_group):
        assert serving_nodes[0] == group * nodes // groups
        assert replicas <= len(serving_nodes) == len(set(serving_nodes)) <= max(-(-nodes // groups), replicas)
    if nodes >= groups and replicas == 1:
        assert [node for serving_nodes in nodes_by_group for node in serving_nodes] == [*range(nodes)], (
            "each serves one group"
        )
    if nodes <= groups:
        assert {node for serving_nodes in nodes_by_group for node in serving_nodes} == set(range(nodes)), (
            "each serves some"
        )


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        ({"mesh": {"dp_replicate": 4, "dp_shard": 2}, "gpus_per_host": 4}, "mesh",
         "ranks 0 and 2 of one DP group on the same host, because"),
        ({"mesh": {"dp_replicate": 2, "pp": 2}}, "mesh",
         "has 2 replicas for gpus_per_host: 2; a switch copies what passes between hosts"),
        ({"mesh": {"dp_replicate": 3}, "gpus_per_host": 2}, "mesh", "has 3 ranks, but 2 hosts"),
        ({"mesh": {"dp_replicate": 3}}, "mesh", "has 3 ranks, but 2 hosts with gpus_per_host: 2 have 4"),
        ({"gpus_per_host": 4}, "mesh", "has 4 ranks, but 2 hosts with gpus_per_host: 4 have 8"),
        ({"mesh": {"dp_replicate": 1, "dp_shard": 4}}, "mesh.dp_replicate", "from 2 to 65536"),
        ({"mesh": {"dp_replicate": 2, "dp_shrad": 2}}, "mesh.dp_shrad", "did you mean dp_shard?"),
        ({"mesh": {"dp_shard": 4}}, "mesh.dp_replicate", "is missing"),
        ({"mesh": {"dp_replicate": 2, "dp_shard": 0}}, "mesh.dp_shard", "from 1 to 65536"),
        ({"mesh": {"dp_replicate": 65536, "tp": 65536}}, "mesh", "a job has 65,536 at most"),
        ({"mesh": 5}, "mesh", "must be a mapping"),
        ({"gpus_per_host": "two"}, "gpus_per_host", "whole number from 1 to 64"),
        ({"gpus_per_host": ...}, "gpus_per_host", "is missing; a mesh needs it"),
        ({"hosts": ...}, "hosts", "is missing; a mesh needs it"),
        ({"dp_groups": []}, "dp_groups", "is what mesh describes already"),
        ({"replicas": 4}, "replicas", "4 replicas need as many shadow nodes; the job has 3"),
        ({"hosts": [{"name": "a b", "nics": [interface(0)]}, {"name": "b", "nics": [interface(1)]}]},
         "hosts[0].name", "must be a name"),
        ({"hosts": [{"name": "a", "nics": [interface(0)]}, {"name": "a", "nics": [interface(1)]}]},
         "hosts[1].name", "host name a is taken already"),
        ({"hosts": [{"name": "a", "nics": [interface(0)]}, {"name": "b", "nics": [{"ip": "10.0.0.1"}]}]},
         "hosts[1].nics[0].mac", "is missing"),
    ],
)  # fmt: skip
def test_a_fault_is_placed_and_says_what_would_be_right(
    tmp_path: Path, change: dict[str, Any], where: str, message: str
) -> None:
    data = meshed(1, 2, 2, gpus=2, nodes=3) | change
    messages = faults(tmp_path, {key: value for key, value in data.items() if value is not ...})
    assert message in messages[where]
    assert all(path.startswith(("hosts", where.partition("[")[0])) for path in messages), messages


def test_replicas_on_a_host_need_the_ring(tmp_path: Path) -> None:
    """NCCL has no reduction within hosts, and only DDP trains such a mesh."""
    messages = faults(tmp_path, meshed(replicate=4, gpus=2) | {"collective": "nccl"})
    assert messages == {
        "collective": "nccl can't sum over the 2 replicas that the mesh puts on each host yet: use ring or "
        "tree, or make the ranks of a host shards of one replica (dp_shard: 2)"
    }
    for data in (meshed(replicate=4), meshed(shard=2, gpus=2)):
        assert read_job(write(tmp_path, data | {"collective": "nccl"})).collective == "nccl"


def test_without_a_mesh_a_job_needs_groups(tmp_path: Path) -> None:
    data = meshed(gpus=1)
    del data["mesh"]
    assert "or give a mesh" in faults(tmp_path, data)["dp_groups"]


@given(st.data())
@settings(max_examples=60)
def test_no_broken_value_ends_with_an_exception(data: st.DataObject) -> None:
    document = meshed(2, 2, 2, gpus=2)
    key = data.draw(st.sampled_from(["hosts", "mesh", "gpus_per_host", "shadow_nodes", "replicas"]))
    at: Any = document
    while isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
        at = at[key]
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
    at[key] = data.draw(st.sampled_from([None, 5, 2.5, "x", [], {}, [[]], [{}], True, -1, 10**30]))
    placing = place(document)
    _, wrong = checks.structure(document)
    assert all(fault.path for fault in placing.located_faults([*wrong, *checks.within_job(document)]))


def test_commands_name_groups_by_their_place_in_the_mesh(tmp_path: Path) -> None:
    file = write(tmp_path, meshed(2, 2, 4, gpus=4, nodes=4, nics=1))
    assert invoke("validate", file)[1].startswith("demo: valid; 8 DP groups (pp 2 x dp_shard 4), 16 ranks, ")
    status, text = invoke("plan", file)
    assert status == 0
    row = next(line for line in text.splitlines() if line.lstrip().startswith("5 (pp 1, dp_shard 1)"))
    assert " ".join(row.split()) == "5 (pp 1, dp_shard 1) 9, 13 gpu2, gpu3 2 1"
    assert " ".join(RULE.split()) in " ".join(text.split())
    groups = json.loads(invoke("plan", file, "--json")[1])["jobs"]["demo"]["dp_groups"]
    assert groups[5] == {
        "dp_group": 5,
        "mesh": {"pp": 1, "dp_shard": 1, "tp": 0},
        "ranks": [9, 13],
        "hosts": ["gpu2", "gpu3"],
        "shadow_nodes": [2],
        "first_shadow_id": 1,
    }
    status, text = invoke("plan", file, "--capacity", "--model", "ResNet50")
    assert "DP groups 4 (pp 1, dp_shard 0) to 7 (pp 1, dp_shard 3), each:" in " ".join(text.split())


def test_too_many_streams_for_a_switch_are_a_fault_of_the_mesh(tmp_path: Path) -> None:
    file = write(tmp_path, meshed(1, 2, 8, gpus=8, nodes=30, channels=8) | {"replicas": 30})
    status, text = invoke("validate", file)
    assert status == 2
    assert "mesh: switch tor0 (softswitch): 115200" in " ".join(text.split())


@pytest.mark.parametrize("key", ["mesh", "gpus_per_host"])
def test_an_empty_value_is_a_fault(tmp_path: Path, key: str) -> None:
    """Without one, `run` would remove the job from its switch."""
    with pytest.raises(JobError):
        read_job(write(tmp_path, meshed() | {key: None}))


def test_gpus_per_host_without_a_mesh_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="gpus_per_host"):
        read_job(write(tmp_path, job_data() | {"gpus_per_host": 3}))


def test_the_capacity_of_replicas_on_a_host_counts_the_model_once(tmp_path: Path) -> None:
    file = write(tmp_path, meshed(1, 4, gpus=2, nodes=2))
    text = invoke("plan", file, "--capacity", "--model", "ResNet50")[1]
    assert "DP groups 0 (local_rank 0) to 1 (local_rank 1), together:" in " ".join(text.split())
    output = invoke("plan", file, "--capacity", "--model", "ResNet50", "--json")[1]
    capacity = json.loads(output[output.index("{\n") :])
    assert sum(nic["bytes"] for nic in capacity["nics"]) == capacity["models"][0]["bytes"]
    first_bytes, second_bytes = (shard["nbytes"] for shard in capacity["shards"])
    assert first_bytes + second_bytes == capacity["models"][0]["bytes"]
    assert abs(first_bytes - second_bytes) < 0.01 * first_bytes
