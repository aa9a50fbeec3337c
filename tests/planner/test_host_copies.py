"""What jobs with copies by hosts need: who sends what to whom, and whether hosts and shadow nodes suffice."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from checkmate.job import host_copies
from checkmate.job.schema import Job
from checkmate.job.validation import data_of
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.planner.part_demand import PartDemand
from checkmate.planner.part_plan import node_plans, rank_share, senders
from checkmate.wire.copies import KEPT_ITERATIONS
from testbed.copies import local_job
from tests.support.cli import invoke
from tests.support.planner import ADAMW, LINE, SIZES, model


def job_data(**changes: Any) -> dict[str, Any]:
    """Return a job file of 16 ranks and 2 shadow nodes as data."""
    nodes = [{"id": node, "mgmt": f"cpu{node}:7000"} for node in range(2)]
    return {"job": "mine", "copies": "host", "ranks": 16, "shadow_nodes": nodes, **changes}


def job_of(ranks: int, nodes: int, replicas: int) -> Job:
    """Return a job with one DP group."""
    addresses = [{"id": node, "mgmt": f"cpu{node}:7000"} for node in range(nodes)]
    job, faults = host_copies.read(job_data(ranks=ranks, shadow_nodes=addresses, replicas=replicas))
    assert job is not None, faults
    return job


def demand_of(job: Job, *sizes: int) -> PartDemand:
    return PartDemand(job, (model(*sizes),), ADAMW, LINE, 4 << 20, gpus_per_host=1)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data()))
    return file


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_rank_sends_its_part_to_the_shards_that_it_overlaps(ranks: int, shards: int) -> None:
    for shard in range(shards):
        assert list(senders(ranks, shard, shards)) == [
            position
            for position in range(ranks)
            if Fraction(position, ranks) < Fraction(shard + 1, shards)
            and Fraction(position + 1, ranks) > Fraction(shard, shards)
        ]


@given(st.integers(1, 30), st.integers(1, 6), st.data(), SIZES)
def test_every_byte_is_sent_once_to_each_holder(
    ranks: int, nodes: int, data: st.DataObject, sizes: list[int]
) -> None:
    job = job_of(ranks, nodes, replicas := data.draw(st.integers(1, nodes)))
    demand = demand_of(job, *sizes)
    nbytes = 4 * sum(sizes)
    assert sum(rank.part_bytes for rank in demand.ranks) == nbytes
    assert sum(rank.sent_bytes for rank in demand.ranks) == nbytes * replicas
    assert sum(nic.nbytes for nic in demand.nics) == nbytes * replicas
    assert sum(nic.streams for nic in demand.nics) == sum(rank.streams for rank in demand.ranks)
    of_shards = {node.node: sum(shard.nbytes for shard in node.shards) for node in demand.nodes}
    assert {nic.node: nic.nbytes for nic in demand.nics} == {n: size for n, size in of_shards.items() if size}
    share = float(rank_share(job, 0)) * nbytes
    assert all(abs(rank.sent_bytes - share) <= 4 * replicas for rank in demand.ranks), "cut at elements"


def test_nodes_get_streams_as_the_layout_of_equal_shards_has_them() -> None:
    job = job_of(16, 4, 2)
    demand = demand_of(job, *[160] * 16)
    plans = list(node_plans(job))
    assert [(plan.node.id, plan.streams) for plan in plans] == [
        (nic.node, nic.streams) for nic in demand.nics
    ]
    assert [plan.shards for plan in plans] == [((0, s), (0, t)) for s, t in ((0, 3), (0, 1), (1, 2), (2, 3))]
    assert plans[1].ranks == (*range(8),)


def test_a_rank_keeps_as_many_iterations_as_planned() -> None:
    assert KEPT_ITERATIONS == 2
    demand = demand_of(job_of(4, 2, 2), 400)
    assert demand.busiest_rank.host_memory == 2 * 2 * 400
    assert replace(demand, gpus_per_host=8).ranks == demand.ranks


def test_plan_says_who_sends_what_to_whom(tmp_path: Path, job_file: Path) -> None:
    code, output = invoke("plan", job_file)
    assert code == 0, output
    assert "1/16 (6.2%)" in output
    assert "cpu1:7002" in output and "8-15" in output
    assert "switch" not in output
    job_file.write_text(yaml.safe_dump(job_data(ranks=None, mesh={"dp_replicate": 2, "dp_shard": 2})))
    code, output = invoke("plan", job_file, "--json")
    job = json.loads(output)["jobs"]["mine"]
    assert (code, job["copies"], job["rank_shares"]) == (0, "host", [0.5, 0.5])
    assert [group["ranks"] for group in job["dp_groups"]] == [[0, 2], [1, 3]]
    assert [(node["node"], node["ranks"], node["streams"]) for node in job["nodes"]] == [
        (0, [0, 2], 2),
        (1, [1, 3], 2),
    ]


def test_a_group_of_one_rank_is_planned(job_file: Path) -> None:
    """As FSDP without replicas has."""
    job_file.write_text(yaml.safe_dump(job_data(ranks=None, mesh={"dp_shard": 4})))
    code, output = invoke("plan", job_file)
    assert (code, "1 (100.0%)" in output) == (0, True), output
    code, output = invoke("plan", job_file, "--capacity", "--model", "ResNet50")
    assert (code, "ring AllReduce" in output) == (0, False), output


CAPACITY = ["--capacity", "--model", "GPT3-XL"]


def test_capacity_needs_no_switch(job_file: Path) -> None:
    code, output = invoke("plan", job_file, *CAPACITY)
    assert code == 0, output
    assert "nothing was checked" in output and "not checked: the pinned memory" in output
    assert " 3.3%" in output, "of what a ring AllReduce sends: 1/30"
    more = ["--iteration-time", "1s", "--pcie-rate", "200Gbit/s", "--host-memory", "8GB"]
    code, output = invoke("plan", job_file, *CAPACITY, *more, "--node-memory", "64GB", "--json")
    report = json.loads(output[output.index("{\n") :])
    assert (code, report["fits"]) == (0, True)
    assert {check["what"] for check in report["checks"]} == {
        "sending copies",
        "copying from the GPU",
        "pinned memory",
        "receiving an iteration",
        "memory",
    }
    assert sum(node["bytes"] for node in report["nodes"]) == 2_631_446_528
    (sending,) = [check for check in report["checks"] if check["what"] == "sending copies"]
    assert sending["needed"] == pytest.approx(8 * 2_631_446_528 / 16 / 100e9)


@pytest.mark.parametrize(
    ("options", "path", "words"),
    [
        (["--link-rate", "1Gbit/s"], "ranks", "it would fit with links of 2.64 Gbit/s, or with more ranks"),
        (["--gpus-per-host", "8", "--link-rate", "10Gbit/s"], "ranks", "links of 21.1 Gbit/s"),
        (["--pcie-rate", "1Gbit/s"], "ranks", "copies 0.164 GB from its GPU an iteration"),
        (["--host-memory", "100MB"], "ranks", "needs 0.329 GB of pinned memory and has 0.1 GB"),
        (["--nic-rate", "10Gbit/s"], "shadow_nodes[1]", "it would fit with 3 more shadow nodes like it"),
        (
            ["--node-memory", "8GB"],
            "shadow_nodes[1]",
            "GB and has 8 GB (the worst of 2 nodes over the limit); it would fit with",
        ),
    ],
)
def test_a_scarce_resource_is_named_with_the_smallest_change(
    job_file: Path, options: list[str], path: str, words: str
) -> None:
    code, output = invoke("plan", job_file, *CAPACITY, "--iteration-time", "500ms", *options)
    assert code == 2
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert any(f" {path}: " in error and words in error for error in errors), output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--entries"], "--entries is for copies by switch"),
        (["--pfc"], "--pfc is for copies by switch"),
        ([*CAPACITY, "--receive-buffer", "8"], "--receive-buffer is for copies by switch"),
        (["--gpus-per-host", "8"], "--gpus-per-host needs --capacity"),
    ],
)
def test_options_without_effect_are_refused(job_file: Path, options: list[str], words: str) -> None:
    code, output = invoke("plan", job_file, *options)
    assert (code, words in output) == (2, True), output


@pytest.mark.parametrize(
    ("name", "factor"), [("muon", 2), ("adafactor", 1), ("lion_pytorch:Lion", 2), ("adamw", 1)]
)
def test_copies_of_state_take_its_bytes_too(name: str, factor: int) -> None:
    """On the way, and three times on a node: what it holds, and what arrives."""
    if ":" in name:
        pytest.importorskip(name.partition(":")[0])
    job, optimizer = job_of(4, 2, 1), NamedOptimizer(name)
    assert optimizer.copied == (name != "adamw")
    demand = PartDemand(job, (model(5000, 3000),), optimizer, LINE, 4 << 20, gpus_per_host=1)
    assert sum(rank.part_bytes for rank in demand.ranks) == factor * 8000 * 4
    memories = [node.memory for node in demand.nodes]
    assert sum(memory.parameters for memory in memories) == 8000 * 4
    received = sum(memory.gradients for memory in memories)
    assert received == 2 * factor * 8000 * 4


def test_copies_of_state_are_planned_for_hosts_alone(job_file: Path) -> None:
    arguments = ["plan", str(job_file), "--capacity", "--model", "ResNet50", "--optimizer", "muon"]
    options = ["--iteration-time", "1s", "--node-memory", "64GB"]
    status, output = invoke(*arguments, *options)
    assert status == 0, output
    assert "add --profile" not in output
    job_file.write_text(yaml.safe_dump(data_of(local_job(nodes=1), exclude_none=True)))
    status, output = invoke(*arguments)
    assert (status, "its state can be copied by hosts only" in " ".join(output.split())) == (2, True)
    status, output = invoke("profile", "--optimizer", "muon")
    assert (status, "leaves nothing to measure" in " ".join(output.split())) == (2, True)
