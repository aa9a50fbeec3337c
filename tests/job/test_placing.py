"""Ranks on hosts: jobs that list hosts, and faults of them with their place in the file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from checkmate.job import checks, editor_schema
from checkmate.job.boundaries import first_shadow_ids
from checkmate.job.files import JobError, read_job, read_jobs
from checkmate.job.placing import place
from checkmate.job.validation import data_of, of_data
from checkmate.keys.roles import Role, hosts_of
from checkmate.ring.place import ring_ports
from controlplane import plan as planning
from testbed.jobs import job_data, tofino_job_data
from tests.support.cli import invoke
from tests.support.job_files import edited, faults, write

EDITORS = Draft202012Validator(editor_schema.of_job())


def hosted(nics: int = 1, hosts: int = 2, ranks: int = 2, **kwargs: Any) -> dict[str, Any]:
    """Return a job with `ranks` DP groups over the same hosts, each of which has `nics` for its ranks."""
    data = job_data(groups=1, ranks=hosts * nics, **kwargs)
    nics_of_hosts = [dict(rank) for rank in data["dp_groups"][0]["ranks"]]
    for number, rank in enumerate(nics_of_hosts):
        del rank["rank"], rank["mgmt"]
        rank["ip"] = f"10.0.1.{number + 1}"
    data["hosts"] = [
        {"name": f"gpu{h}", "mgmt": f"192.168.0.{h + 1}", "nics": nics_of_hosts[h * nics : (h + 1) * nics]}
        for h in range(hosts)
    ]
    data["dp_groups"] = [
        {"ranks": [{"rank": h * ranks + i, "host": f"gpu{h}", "nic": i % nics} for h in range(hosts)]}
        for i in range(ranks)
    ]
    return data


def test_ranks_have_what_their_host_has(tmp_path: Path) -> None:
    data = hosted()
    assert list(EDITORS.iter_errors(data)) == []
    job = read_job(write(tmp_path, data))
    for group in job.dp_groups:
        for rank, host in zip(group.ranks, job.hosts, strict=True):
            (nic,) = host.nics
            assert (rank.ip, rank.mac, rank.port, rank.mgmt) == (nic.ip, nic.mac, nic.port, host.mgmt)
    assert first_shadow_ids(job) == (0, 1)
    assert [name for name, _ in job.interfaces()][:2] == ["host gpu0 of demo", "host gpu1 of demo"]
    assert hosts_of(job, Role.TRAINER) == ("192.168.0.1", "192.168.0.2")


def test_ranks_with_one_address_listen_on_ports_of_their_own(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, hosted(ranks=3)))
    assert [ring_ports(job, group) for group in range(3)] == [[47000, 47000], [47008, 47008], [47016, 47016]]
    apart = read_job(write(tmp_path, hosted(nics=3, ranks=3)))
    assert all(ring_ports(apart, group) == [47000, 47000] for group in range(3))
    assert first_shadow_ids(apart) == (0, 0, 0), "each has addresses of its own"


def test_the_plan_is_that_of_the_same_ranks_in_full(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, hosted(nodes=2, channels=2)))
    in_full = data_of(job, exclude={"hosts"})
    for group in in_full["dp_groups"]:
        for rank in group["ranks"]:
            del rank["host"]
    in_full_job = of_data(type(job), in_full)
    assert planning.plan([job])["tor0"].holdings == planning.plan([in_full_job])["tor0"].holdings


def test_a_host_of_one_rank_is_a_rank_with_an_address(tmp_path: Path) -> None:
    alone = job_data(ranks=2)
    placed = copy.deepcopy(alone)
    placed["hosts"] = [
        {
            "name": f"gpu{rank['rank']}",
            "mgmt": rank.pop("mgmt"),
            "nics": [{key: rank.pop(key) for key in ("ip", "mac", "switch", "port")}],
        }
        for rank in placed["dp_groups"][0]["ranks"]
    ]
    for rank in placed["dp_groups"][0]["ranks"]:
        rank["host"] = f"gpu{rank['rank']}"
    plans = [planning.plan([read_job(write(tmp_path, data))])["tor0"] for data in (alone, placed)]
    assert plans[0].holdings == plans[1].holdings


@pytest.mark.parametrize(
    ("path", "value", "where", "message"),
    [
        ("dp_groups/1/ranks/0/host", "gpu9", "dp_groups[1].ranks[0].host", "no host 'gpu9' in hosts; there"),
        ("dp_groups/1/ranks/0/host", 5, "dp_groups[1].ranks[0].host", "must be a text"),
        ("dp_groups/1/ranks/0/host", ..., "dp_groups[1].ranks[0].host", "missing; there are gpu0, gpu1"),
        ("dp_groups/1/ranks/0/host", "gpu1", "dp_groups[1].ranks[1].host", "need a host each"),
        ("dp_groups/1/ranks/0/nic", 1, "dp_groups[1].ranks[0].nic", "has one NIC, 0, and not 1"),
        ("dp_groups/1/ranks/0/nic", -1, "dp_groups[1].ranks[0].nic", "at least 0"),
        ("dp_groups/1/ranks/0/nic", "a", "dp_groups[1].ranks[0].nic", "must be a whole number"),
        ("dp_groups/1/ranks/0/ip", "10.0.0.9", "dp_groups[1].ranks[0].ip", "a matter of the rank's host"),
        ("dp_groups/1/ranks/0/mgmt", "a", "dp_groups[1].ranks[0].mgmt", "a matter of the rank's host"),
        ("dp_groups/1/ranks/0/rank", 2, "dp_groups[1].ranks[0].rank", "rank number 2 is taken already"),
        ("hosts", ..., "hosts", "is missing; ranks are on gpu0, gpu1: list these with their nics"),
        ("hosts", [], "hosts", "is empty; ranks are on gpu0, gpu1"),
        ("hosts/0/name", "gpu1", "hosts[1].name", "host name gpu1 is taken already by hosts[0]"),
        ("hosts/0/name", "a b", "hosts[0].name", "must be a name"),
        ("hosts/0/nics", [], "hosts[0].nics", "needs at least 1, has 0"),
        ("hosts/0/nics", 5, "hosts[0].nics", "must be a list"),
        ("hosts/0/nics/0", 5, "hosts[0].nics[0]", "must be a mapping"),
        ("hosts/0/nics/0/ip", ..., "hosts[0].nics[0].ip", "is missing"),
        ("hosts/0/nics/0/ip", "10.0.1.2", "hosts[1].nics[0].ip", "is taken already by hosts[0].nics[0]"),
        ("hosts/0/nics/0/mac", "x", "hosts[0].nics[0].mac", "must be a MAC address"),
        ("hosts/0/nics/0/port", 2, "hosts[1].nics[0].port", "switch port tor0 2 is taken already"),
        ("hosts/0/nics/0/switch", "tor9", "hosts[0].nics[0].switch", "no switch 'tor9'"),
        ("hosts/0/nics/0/speed", 1, "hosts[0].nics[0].speed", "unknown key"),
        ("hosts/0/mgmt", "a b", "hosts[0].mgmt", "must be a host name"),
    ],
)
def test_a_fault_is_placed_where_it_is_in_the_file(
    tmp_path: Path, path: str, value: Any, where: str, message: str
) -> None:
    messages = faults(tmp_path, edited(hosted(), path, value))
    assert message in messages[where]
    if (path, value) != ("hosts/0/name", "gpu1"):
        assert list(messages) == [where], "and nothing follows from it"


def test_a_rank_with_an_address_may_stand_beside_hosts(tmp_path: Path) -> None:
    data = hosted()
    alone = job_data(ranks=2, number=1)["dp_groups"][0]["ranks"]
    data["dp_groups"].append({"ranks": [rank | {"rank": 10 + rank["rank"]} for rank in alone]})
    assert list(EDITORS.iter_errors(data)) == []
    assert first_shadow_ids(read_job(write(tmp_path, data))) == (0, 1, 0)


def test_hosts_belong_to_one_job(tmp_path: Path) -> None:
    first, second = hosted(), hosted(name="other")
    second["shadow_nodes"] = job_data(number=1)["shadow_nodes"]
    files = [write(tmp_path, first, "a.yaml"), write(tmp_path, second, "b.yaml")]
    with pytest.raises(JobError) as excinfo:
        read_jobs(files)
    messages = {fault.path: fault.message for fault in excinfo.value.faults}
    assert "claimed already by job 'demo' (hosts[0].nics[0].ip)" in messages["hosts[0].nics[0].ip"]


def test_ports_of_hosts_may_be_front_panel_names(tmp_path: Path) -> None:
    data = hosted()
    panel = tofino_job_data()
    data["fabric"] = panel["fabric"]
    data["shadow_nodes"] = panel["shadow_nodes"]
    for number, host in enumerate(data["hosts"]):
        host["nics"][0]["port"] = f"{20 + number}/0"
    assert list(EDITORS.iter_errors(data)) == []
    job = read_job(write(tmp_path, data))
    assert [group.ranks[0].port for group in job.dp_groups] == [job.hosts[0].nics[0].port] * 2
    data["hosts"][0]["nics"][0]["port"] = "77/0"
    assert list(faults(tmp_path, data)) == ["hosts[0].nics[0].port"]


def test_with_nccl_shadow_ids_of_groups_on_the_same_hosts_end_at_15(tmp_path: Path) -> None:
    data = hosted(ranks=4, nodes=4) | {"collective": "nccl"}
    assert first_shadow_ids(read_job(write(tmp_path, data))) == (0, 4, 8, 12)
    data = hosted(ranks=5, nodes=4) | {"collective": "nccl"}
    messages = faults(tmp_path, data)
    assert list(messages) == ["dp_groups[4]"]
    assert "has shadow ids 16 to 19" in messages["dp_groups[4]"]


def test_what_nccl_will_not_train_is_said_for_groups_on_the_same_hosts(tmp_path: Path) -> None:
    """The job file does not say whether its groups are shards or replicas under DDP."""
    status, text = invoke("validate", write(tmp_path, hosted() | {"collective": "nccl"}))
    assert status == 0
    assert "note: demo: if DDP averages over the ranks of dp_groups[0] and dp_groups[1]" in " ".join(
        text.split()
    )
    printed = invoke("validate", tmp_path / "job.yaml", "--json")[1]
    data = json.loads(printed[printed.index("{") :])
    assert "use ring or tree for that" in data["notes"][0]
    assert "note" not in invoke("validate", write(tmp_path, hosted()))[1]
    assert "note" not in invoke("validate", write(tmp_path, job_data(groups=2) | {"collective": "nccl"}))[1]


def test_gaps_in_ranks_and_idle_shadow_nodes_are_noted(tmp_path: Path) -> None:
    data = job_data(nodes=4, ranks=3)
    data["dp_groups"][0]["ranks"][2]["rank"] = 20
    data["dp_groups"][0]["shadow_nodes"] = [0]
    file = write(tmp_path, data)
    gap, idle = checks.notes(read_job(file))
    assert gap == (
        "demo: no DP group has rank 2-17 and so on, although the last one is 20: "
        "torch numbers 3 ranks from 0 to 2"
    )
    assert idle.startswith("demo: no DP group lists shadow nodes 1-3, so that nothing is held there")


def test_trees_that_no_group_has_are_noted(tmp_path: Path) -> None:
    data = job_data(ranks=7) | {"collective": "tree"}
    (absent,) = checks.notes(read_job(write(tmp_path, data)))
    assert absent == (
        "demo: no DP group has trees (collective: tree), because all have fewer than 8 ranks; "
        "tree_bytes gives them some"
    )
    assert not [*checks.notes(read_job(write(tmp_path, data | {"tree_bytes": 1})))]
    assert not [*checks.notes(read_job(write(tmp_path, job_data(ranks=8) | {"collective": "tree"})))]


@pytest.mark.parametrize("rank", [{"rank": 0}, {"rank": 0, "host": "a", "ip": "10.0.0.1"}, {"host": "a"}])
def test_editors_see_a_rank_without_a_place(rank: dict[str, Any]) -> None:
    data = hosted()
    data["dp_groups"][0]["ranks"][0] = rank
    assert list(EDITORS.iter_errors(data))


@given(st.data())
def test_no_broken_value_ends_with_an_exception(data: st.DataObject) -> None:
    document = hosted(nics=2)
    at: Any = document
    way = data.draw(st.sampled_from(["hosts", "dp_groups"]))
    at, key = document, way
    while isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
        at = at[key]
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
    at[key] = data.draw(st.sampled_from([None, 5, "x", [], {}, [[]], [{}], True, -1]))
    placing = place(document)
    _, wrong = checks.structure(document)
    assert all(fault.path for fault in placing.located_faults([*wrong, *checks.within_job(document)]))


def test_with_nccl_hosts_of_two_names_may_not_be_one_machine(tmp_path: Path) -> None:
    """docs/nccl.md: two ranks of a DP group on one host are a fault of the job file."""
    data = hosted() | {"collective": "nccl"}
    data["hosts"][1]["mgmt"] = data["hosts"][0]["mgmt"]
    with pytest.raises(JobError):
        read_job(write(tmp_path, data))
