"""Job files with copies by hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from checkmate.job.files import JobError, read_job
from checkmate.job.kept import of_json, to_json
from checkmate.job.schema import Sending
from checkmate.keys.roles import Role, hosts_of
from testbed.jobs import job_data
from tests.support.cli import invoke

NODES = [{"id": node, "mgmt": f"shadow{node}.example:7000"} for node in range(2)]


def write(folder: Path, **changes: Any) -> Path:
    """Write a job file; `None` removes a key."""
    data = {"job": "mine", "copies": "host", "ranks": 16, "shadow_nodes": NODES, **changes}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))
    return file


def test_ranks_are_one_dp_group_without_addresses(tmp_path: Path) -> None:
    job = read_job(write(tmp_path))
    assert job.copies == "host"
    (group,) = job.dp_groups
    assert [rank.rank for rank in group.ranks] == [*range(16)]
    assert {rank.named for rank in group.ranks[:2]} == {"rank 0", "rank 1"}
    assert job.shards(0) == 2
    assert job.node(1).gradients_at == ("shadow1.example", 7002)
    assert list(job.fabric.switches) == [] == [nic for node in job.shadow_nodes for nic in node.nics]
    assert hosts_of(job, Role.TRAINER) == ()
    assert of_json(to_json(job)) == job


def test_the_way_of_copies_is_part_of_the_job(tmp_path: Path) -> None:
    sending = {"source": "10.1.2.3/16", "limit": "2.5G", "dscp": 8}
    job = read_job(write(tmp_path, encrypt=True, sending=sending))
    assert job.encrypt
    assert job.sending == Sending(source="10.1.0.0/16", limit="2.5G", dscp=8)
    assert job.sending.bytes_per_second == 312_500_000
    assert of_json(to_json(job)) == job
    plain = read_job(write(tmp_path))
    assert (plain.encrypt, plain.sending.bytes_per_second) == (False, None)


@pytest.mark.parametrize(("key", "value"), [("encrypt", True), ("sending", {"dscp": 8})])
def test_the_way_of_copies_is_not_for_switches(tmp_path: Path, key: str, value: object) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**job_data(), key: value}))
    with pytest.raises(JobError, match=f"{key}: is for copies by hosts .copies: host.: remove it"):
        read_job(file)


@pytest.mark.parametrize(
    ("ranks", "least", "replicas", "words"),
    [
        (2, 1, 1, ""),  # no two parts have all shards
        (2, 1, 2, "is 1 of 2 replicas of the model: .* shards have 2 holders .*: 2 or more, or replicas: 1"),
        (4, 2, 2, "is 2 of 4 replicas of the model: .*: 3 or more, or replicas: 1"),
        (4, 3, 2, ""),
        (3, 2, 2, ""),
        (4, 5, 2, "is 5, but the job has 4 replicas of the model: 1 to 4"),
    ],
)
def test_two_parts_of_a_job_cannot_both_go_on(
    tmp_path: Path, ranks: int, least: int, replicas: int, words: str
) -> None:
    file = write(tmp_path, ranks=ranks, min_replicas=least, replicas=replicas)
    if not words:
        assert read_job(file).min_replicas == least
        return
    with pytest.raises(JobError, match=f"min_replicas: {words}"):
        read_job(file)


def test_a_mesh_has_a_group_for_each_place_of_its_replicas(tmp_path: Path) -> None:
    """Without replicas, each group has one rank."""
    job = read_job(write(tmp_path, ranks=None, mesh={"dp_replicate": 2, "dp_shard": 4}))
    assert [[rank.rank for rank in group.ranks] for group in job.dp_groups] == [[n, n + 4] for n in range(4)]
    assert [group.shadow_nodes for group in job.dp_groups] == [(0,), (0,), (1,), (1,)]
    alone = read_job(write(tmp_path, ranks=None, mesh={"dp_shard": 8}))
    assert [[rank.rank for rank in group.ranks] for group in alone.dp_groups] == [[n] for n in range(8)]


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"ranks": None}, "ranks", "is missing; or give a mesh"),
        ({"mesh": {"dp_shard": 2}}, "ranks", "has ranks and a mesh: give one of them"),
        ({"ranks": 0}, "ranks", "must be from 1 to 65536, not 0"),
        ({"ranks": None, "mesh": {"dp_shard": 300, "tp": 300}}, "mesh", "has 90,000 ranks, and a job has"),
        ({"replicas": 3}, "replicas", "3 replicas need as many shadow nodes; the job has 2"),
        ({"fabric": "fabric.yaml"}, "fabric", "is for copies by switch (copies: switch): remove it"),
        ({"channels": 2}, "channels", "is for copies by switch (copies: switch): remove it"),
        ({"encrypt": "yes"}, "encrypt", "must be true or false"),
        ({"sending": {"limit": 2}}, "sending.limit", "must be bits per second, such as 500M or 2.5G"),
        ({"sending": {"limit": "0G"}}, "sending.limit", "must be bits per second, such as 500M or 2.5G"),
        ({"sending": {"dscp": 64}}, "sending.dscp", "must be from 0 to 63, not 64"),
        ({"sending": {"source": "10.1.0.0.0"}}, "sending.source", "must be the name of an interface, such"),
        ({"sending": {"source": "a network"}}, "sending.source", "must be the name of an interface, such"),
        ({"colour": 2}, "colour", "unknown key; the keys here are job, copies, ranks, mesh,"),
        ({"shadow_nodes": [NODES[0], NODES[0]]}, "shadow_nodes[1].id", "shadow node id 0 is taken already"),
        (
            {"shadow_nodes": [{"id": 0, "mgmt": "a:7000"}, {"id": 1, "mgmt": "a:7002"}]},
            "shadow_nodes[1].mgmt",
            "mgmt address a:7002 is taken already",
        ),
        (
            {"shadow_nodes": [{"id": 0, "mgmt": "a:65534"}]},
            "shadow_nodes[0].gradients",
            "its port would be 65536, after that of mgmt: set gradients",
        ),
        ({"copies": "hosts"}, "copies", "must be 'switch' or 'host', not 'hosts'"),
    ],
)
def test_each_fault_says_where_and_what_would_be_right(
    tmp_path: Path, changes: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(JobError) as caught:
        read_job(write(tmp_path, **changes))
    faults = {fault.path: fault.message for fault in caught.value.faults}
    assert message in faults[path], faults


@pytest.mark.parametrize("command", ["run", "remove", "shell", "nccl check"])
def test_commands_on_switches_say_that_there_is_none(tmp_path: Path, command: str) -> None:
    status, output = invoke(*command.split(), write(tmp_path), *(["--once"] if command == "run" else []))
    assert status == 2
    words = " ".join(output.split())
    assert f"`checkmate {command}` is about switches, and hosts send the copies of mine themselves" in words


def test_validate_says_what_the_job_is(tmp_path: Path) -> None:
    status, output = invoke("validate", write(tmp_path))
    assert (status, " ".join(output.split())) == (
        0,
        "mine: valid; 1 DP group, 16 ranks, 2 shadow nodes, 1 copy of each shard, by hosts",
    )


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (
            ("127.0.0.1:7000", "127.0.0.1:7010"),
            "this machine has the addresses of shadow nodes 0, 1: use --id",
        ),
        (
            ("198.51.100.1:7000", "198.51.100.2:7000"),
            "the addresses of no shadow node of job mine; their addresses are 0: 198.51.100.1",
        ),
    ],
)
def test_which_node_a_machine_is_must_be_clear(tmp_path: Path, hosts: tuple[str, str], words: str) -> None:
    nodes = [{"id": node, "mgmt": host} for node, host in enumerate(hosts)]
    status, output = invoke("shadow", write(tmp_path, shadow_nodes=nodes))
    assert (status, words in " ".join(output.split())) == (2, True), output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"copies": "hosts"}, "must be 'switch' or 'host', not 'hosts'; did you mean host?"),
        ({"copies": None}, "is missing: with ranks and without a fabric, hosts copy, copies: host"),
    ],
)
def test_a_way_that_is_not_there_is_the_only_fault(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    node = {"id": 0, "mgmt": "cpu0:7000"}
    data = {"job": "mine", "copies": "host", "ranks": 2, "shadow_nodes": [node], **changes}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))
    with pytest.raises(JobError) as caught:
        read_job(file)
    (fault,) = caught.value.faults
    assert (fault.path, fault.message) == ("copies", message)
