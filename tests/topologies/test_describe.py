"""Descriptions of labs: pure, so these tests do not need root."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.job.boundaries import streams
from checkmate.job.files import read_jobs
from controlplane.network import Network
from controlplane.plan import plan
from topologies import picture, switches, torchrun
from topologies.describe import job_files
from topologies.describe import topology as describe
from topologies.describe.job_files import topology_data
from topologies.describe.topology import BadDescription, Topology, build, load
from topologies.kernel import loss


def write(topology: Topology, folder: Path, target: job_files.Target = "bmv2") -> Path:
    folder.joinpath(job_files.FABRIC_FILE).write_text(
        job_files.as_yaml(job_files.fabric(topology, target), "fabric")
    )
    job = folder / job_files.JOB_FILE
    job.write_text(job_files.as_yaml(job_files.job(topology, "job"), "job"))
    return job


@st.composite
def lab_files(draw: st.DrawFn) -> dict[str, Any]:
    """Return a tree of switches, with groups and shadow nodes at random switches."""
    names = [f"sw{i}" for i in range(draw(st.integers(1, 5)))]
    switch = st.sampled_from(names)
    nodes = draw(st.lists(st.lists(switch, min_size=1, max_size=2), min_size=1, max_size=6))
    node_lists = st.lists(st.sampled_from(range(len(nodes))), min_size=1, unique=True)
    group = st.fixed_dictionaries(
        {"ranks": st.lists(switch, min_size=2, max_size=8)}, optional={"shadow_nodes": node_lists}
    )
    groups = draw(st.lists(group, min_size=1, max_size=4))
    hosts = draw(st.lists(st.lists(switch, min_size=1, max_size=2), max_size=5))
    if len(hosts) > 1:  # each group has a rank on every host
        groups = [{key: value for key, value in dp_group.items() if key != "ranks"} for dp_group in groups]
        groups = [dp_group | {"hosts": draw(st.permutations(range(len(hosts))))} for dp_group in groups]
    collective = draw(st.sampled_from(["ring", "tree"] if len(hosts) > 1 else ["ring", "tree", "nccl"]))
    return {
        "title": "drawn",
        "channels": draw(st.integers(1, 4 if collective == "tree" else 8)),
        "replicas": draw(
            st.integers(1, min(len(dp_group.get("shadow_nodes", nodes)) for dp_group in groups))
        ),
        "switches": names,
        "links": [[names[draw(st.integers(0, i - 1))], names[i]] for i in range(1, len(names))],
        **({"hosts": hosts} if len(hosts) > 1 else {}),
        "dp_groups": groups,
        "collective": collective,
        "shadow_nodes": nodes,
    }


@st.composite
def meshed_labs(draw: st.DrawFn) -> dict[str, Any]:
    """Return a lab with a mesh, whose hosts have one or two NICs."""
    mesh = {name: draw(st.integers(1, 2)) for name in ("pp", "dp_shard", "tp")}
    mesh["dp_replicate"] = draw(st.integers(2, 3))
    inner = mesh["dp_shard"] * mesh["tp"]
    gpus = draw(st.sampled_from([count for count in (1, 2, 4) if inner % count == 0]))
    hosts = mesh["pp"] * mesh["dp_replicate"] * inner // gpus
    nics = st.lists(st.just("tor"), min_size=1, max_size=2)
    nodes = draw(st.lists(nics, min_size=1, max_size=5))
    return {
        "title": "drawn",
        "example": draw(st.sampled_from(["gpt.train", "hsdp"])),
        "replicas": draw(st.integers(1, len(nodes))),
        "switches": ["tor"],
        "hosts": draw(st.lists(nics, min_size=hosts, max_size=hosts)),
        "mesh": mesh,
        "gpus_per_host": gpus,
        "shadow_nodes": nodes,
    }


@st.composite
def bridge_labs(draw: st.DrawFn) -> dict[str, Any]:
    """Return a lab with copies by hosts, with a mesh or without."""
    hosts, ranks_of_host = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    replicas = draw(st.integers(1, 3))
    shards = draw(st.sampled_from([d for d in range(1, 17) if hosts * ranks_of_host % d == 0]))
    mesh = {"dp_replicate": hosts * ranks_of_host // shards, "dp_shard": shards}
    return {
        "title": "drawn",
        "copies": "host",
        "replicas": replicas,
        "hosts": hosts,
        "gpus_per_host": ranks_of_host,
        **({"mesh": mesh} if shards > 1 or draw(st.booleans()) else {}),
        "shadow_nodes": draw(st.integers(replicas, 6)),
    }


@settings(max_examples=60)
@given(data=bridge_labs())
def test_a_lab_without_switches_has_the_groups_of_its_job(
    data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    topology, folder = build("drawn", data), tmp_path_factory.mktemp("lab")
    files = job_files.files(topology, "drawn", "softswitch")
    assert {*files} == {job_files.JOB_FILE, job_files.TOPOLOGY_FILE}
    folder.joinpath(job_files.JOB_FILE).write_text(files[job_files.JOB_FILE])
    (job,) = read_jobs([folder / job_files.JOB_FILE])
    assert (job.copies, job.replicas, job.fabric.switches) == ("host", data["replicas"], ())
    assert [([rank.rank for rank in group.ranks], group.shadow_nodes) for group in job.dp_groups] == [
        ([rank.number for rank in group.ranks], group.shadow_nodes) for group in topology.groups
    ]
    assert [host.name for host in topology.trainers] == [f"host{i}" for i in range(data["hosts"])]
    assert not any(host.interfaces for host in topology.hosts)
    command = torchrun.command(topology, topology.trainers[-1], ["train.py"])
    assert f"--nproc-per-node={data['gpus_per_host']}" in command
    text = picture.picture(topology)
    assert all(f" {host.name}" in text for host in topology.hosts)
    steps = picture.next_steps(topology, "drawn", "job.yaml")
    assert "-- checkmate run" not in steps and " remove " not in steps and " status" in steps


@settings(max_examples=60)
@given(data=meshed_labs())
def test_a_lab_has_the_groups_of_its_jobs_mesh(
    data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    topology = build("drawn", data)
    (job,) = read_jobs([write(topology, tmp_path_factory.mktemp("lab"))])
    assert job.mesh is not None and asdict(job.mesh) == data["mesh"]
    expected = [
        ([(rank.rank, rank.host, rank.ip) for rank in group.ranks], group.shadow_nodes)
        for group in job.dp_groups
    ]
    assert expected == [
        ([(rank.number, rank.host.name, rank.interface.ip) for rank in group.ranks], group.shadow_nodes)
        for group in topology.groups
    ]
    assert len(topology.trainers) == len(data["hosts"])


@settings(max_examples=60)
@given(data=lab_files())
def test_any_lab_gives_a_job_that_the_control_plane_accepts(
    data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    topology = build("drawn", data)
    jobs = read_jobs([write(topology, tmp_path_factory.mktemp("lab"))])
    sizes = [len(group.get("ranks") or group["hosts"]) for group in data["dp_groups"]]
    assert [len(group.ranks) for group in jobs[0].dp_groups] == sizes
    assert [[rank.ip for rank in group.ranks] for group in jobs[0].dp_groups] == [
        [rank.interface.ip for rank in group.ranks] for group in topology.groups
    ]
    assert jobs[0].collective == data["collective"]
    assert set(plan(jobs)) == set(data["switches"])


@settings(max_examples=60)
@given(data=lab_files())
def test_each_cable_end_is_there_once(data: dict[str, Any]) -> None:
    topology = build("drawn", data)
    nics = [nic for host in topology.hosts for nic in host.interfaces]
    ends = [
        *((n.switch, n.port) for n in nics),
        *(end for link in topology.links for end in (link.a, link.b)),
    ]
    ports = [(s.name, port) for s in topology.switches for port in range(1, s.ports + 1)]
    assert sorted(ends) == sorted(ports)
    addresses = Counter([*(n.ip for n in nics), *(s.stub_ip for s in topology.switches)])
    managed = Counter([*(h.mgmt for h in topology.hosts), *(s.mgmt for s in topology.switches)])
    assert max([*addresses.values(), *managed.values()]) == 1
    assert len({n.mac for n in nics}) == len(nics)


def test_a_job_with_copies_by_hosts_may_be_beside_jobs_with_switches(tmp_path: Path) -> None:
    first = {
        "title": "the first",
        "switches": ["a"],
        "dp_groups": [{"ranks": ["a", "a"]}],
        "shadow_nodes": [["a"]],
    }
    by_hosts = {"title": "the second", "copies": "host", "hosts": 2, "shadow_nodes": 1}
    third = {"title": "the third", "dp_groups": [{"ranks": ["a", "a"]}], "shadow_nodes": [["a"]]}
    lab = describe.together({"one": first, "two": by_hosts, "three": third})
    assert [job.copies for job in lab.jobs] == ["switch", "host", "switch"]
    assert lab.jobs[2].switches == lab.switches and lab.switches[0].ports == 6
    for content in job_files.files(lab, "one", "softswitch").items():
        tmp_path.joinpath(content[0]).write_text(content[1])
    jobs = read_jobs([tmp_path / "job.yaml", tmp_path / "three.yaml"])
    assert set(plan(jobs)) == {"a"}
    (by_hosts_job,) = read_jobs([tmp_path / "two.yaml"])
    assert by_hosts_job.shadow_nodes[0].mgmt == f"{lab.host('b_shadow0').mgmt}:7000"
    assert len({host.mgmt for host in lab.hosts}) == len(lab.hosts)


def test_jobs_beside_each_other_share_switches_and_nothing_else(tmp_path: Path) -> None:
    """The second has hosts that have two ranks each, and no switches of its own."""
    first = {
        "title": "the first",
        "switches": ["a", "b"],
        "links": [["a", "b"]],
        "dp_groups": [{"ranks": ["a", "b"]}],
        "shadow_nodes": [["a", "b"], ["b"]],
    }
    second = {
        "title": "the second",
        "hosts": [["a"], ["b"]],
        "mesh": {"dp_replicate": 2, "dp_shard": 2},
        "gpus_per_host": 2,
        "shadow_nodes": [["b"], ["a"]],
    }
    lab = describe.together({"one": first, "two": second})
    assert [host.name for host in lab.hosts] == [
        *("rank0", "rank1", "shadow0", "shadow1"),
        *("b_host0", "b_host1", "b_shadow0", "b_shadow1"),
    ]
    assert [job.name for job in lab.jobs] == ["one", "two"]
    assert [[node.number for node in job.shadow_nodes] for job in lab.jobs] == [[0, 1], [0, 1]]
    ports = [(nic.switch, nic.port) for host in lab.hosts for nic in host.interfaces]
    ports += [end for link in lab.links for end in (link.a, link.b)]
    assert sorted(ports) == [(s.name, port + 1) for s in lab.switches for port in range(s.ports)]
    for content in job_files.files(lab, "one", "softswitch").items():
        tmp_path.joinpath(content[0]).write_text(content[1])
    jobs = read_jobs([tmp_path / "job.yaml", tmp_path / "two.yaml"])  # which checks addresses, too
    assert [(job.job, len(job.dp_groups)) for job in jobs] == [("one", 1), ("two", 2)]
    assert set(plan(jobs)) == {"a", "b"}


@pytest.mark.parametrize("name", describe.names())
def test_management_addresses_sort_as_ranks_do(name: str) -> None:
    """They sort as text, as torchrun needs them."""
    addresses = [str(rank.mgmt) for rank in load(name).ranks]
    assert sorted(addresses) == addresses


def test_ranks_of_a_host_are_numbered_as_torchrun_numbers_them() -> None:
    data = {
        "title": "shared",
        "switches": ["tor"],
        "hosts": [["tor", "tor"], ["tor", "tor"], ["tor"]],
        "dp_groups": [{"hosts": [1, 0, 2]}, {"hosts": [0, 1]}, {"hosts": [1, 2]}, {"hosts": [2, 0]}],
        "shadow_nodes": [["tor"]],
    }
    topology = build("shared", data)
    placed = [[(rank.number, rank.nic) for rank in group.ranks] for group in topology.groups]
    assert placed == [[(3, 0), (0, 0), (6, 0)], [(1, 0), (4, 0)], [(5, 1), (7, 0)], [(8, 0), (2, 1)]]
    command = torchrun.command(topology, topology.trainers[1], ["train.py"])
    assert {"--nnodes=3", "--nproc-per-node=3", "--local-addr=172.31.1.102"} < {*command}


def test_each_torchrun_meets_the_others_at_the_first_rank() -> None:
    topology = load("paper_testbed")
    hosts = topology.trainers
    commands = [torchrun.command(topology, host, ["train.py", "--steps", "3"]) for host in hosts]
    for host, command in zip(hosts, commands, strict=True):
        assert "--rdzv-endpoint=172.31.1.101:29400" in command
        assert f"--local-addr={host.mgmt}" in command
        assert {"--nnodes=12", "--nproc-per-node=1"} < {*command}
        assert command[-3:] == ["train.py", "--steps", "3"]
    assert [("--rdzv-conf=is_host=1" in command) for command in commands] == [True] + [False] * 11


@settings(max_examples=30)
@given(data=lab_files())
def test_the_picture_shows_each_host_and_each_port(data: dict[str, Any]) -> None:
    topology = build("drawn", data)
    text = picture.picture(topology)
    blocks = text.split("\n\n")
    assert len(blocks) == len(topology.switches)
    for switch, block in zip(topology.switches, blocks, strict=True):
        here = [nic for host in topology.hosts for nic in host.interfaces if nic.switch == switch.name]
        joints = sum(line.count("┴") + line.count("┬") for line in block.splitlines())
        assert joints == len(here)
        for nic in here:
            assert f"│{nic.port}" in block


def test_picture_of_single_tor() -> None:
    assert picture.picture(load("single_tor")) == "\n".join(
        [
            " rank0 rank1 rank2 rank3",
            "    │1    │2    │3    │4",
            "┌───┴─────┴─────┴─────┴──┐",
            "│ tor, 172.31.3.1:9559   │",
            "└─┬───┬───┬───┬──────────┘",
            "  │5  │6  │7  │8",
            " shadow0 shadow1",
        ]
    )


@pytest.mark.parametrize("name", ["single_tor", "two_tor", "paper_testbed"])
def test_what_to_try_leads_to_a_protected_training(name: str) -> None:
    topology = load(name)
    lines = picture.next_steps(topology, "mine", "/jobs/job.yaml").splitlines()
    assert len(lines) < 20
    assert lines[2].endswith(" lab train mine")
    assert "run and each shadow occupies a terminal" in lines[4]
    text = "\n".join(lines[5:])
    for number in range(len(topology.shadow_nodes)):
        assert f"lab exec mine shadow{number} -- " in text
        assert f"shadow --id {number}\n" in text
    order = [
        " run\n",
        " shadow ",
        "torch.distributed.run",
        "pkill -9",
        " status\n",
        " consolidate ",
        " remove ",
        " lab down",
    ]
    places = [text.index(word) for word in order]
    assert places == sorted(places)


def test_picture_of_a_lab_without_switches() -> None:
    assert picture.picture(load("ddp_hosts")) == "\n".join(
        [
            " host0 host1",
            "    │     │",
            "┌───┴─────┴───────────┐",
            "│ mgmt, 172.31.0.0/16 │",
            "└────┬───────┬────────┘",
            "     │       │",
            " shadow0 shadow1",
        ]
    )


def test_many_shadow_nodes_do_not_make_the_list_long() -> None:
    single = load("single_tor")
    topology = replace(single, shadow_nodes=single.shadow_nodes * 20)
    lines = picture.next_steps(topology, "mine", "/jobs/job.yaml").splitlines()
    assert len(lines) < 20
    assert lines[11].endswith("--id 39")


def test_what_to_try_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell itself parses it: an environment in a folder with a space, and one without the command."""
    place = tmp_path / "a checkout" / "bin"
    place.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    module = [str(place / "python"), "-m", "checkmate.cli.entry"]
    for here, inside in ((module, module), ([str(place / "checkmate")], ["checkmate"])):
        if here != module:
            (place / "checkmate").touch(mode=0o755)
        lines = picture.next_steps(load("single_tor"), "mine", "/run/a b/job.yaml").splitlines()
        execute = [*here, "lab", "exec", "mine"]
        expected = [*execute, "ctl", "--", *inside, "run"]
        assert [shlex.split(line) for line in lines].count(expected) == 1
        (loop,) = [line for line in lines if line.startswith("  for r in")]
        assert shlex.split(loop)[7 : 7 + len(execute)] == execute
    monkeypatch.setenv("PATH", str(place))
    assert "  checkmate lab train mine" in picture.next_steps(load("single_tor"), "mine", "job").splitlines()


@settings(max_examples=60)
@given(data=lab_files() | meshed_labs() | bridge_labs())
def test_a_recorded_topology_is_the_same(data: dict[str, Any]) -> None:
    topology = build("kept", data)
    assert build("kept", job_files.topology_data(topology)) == topology


@pytest.mark.parametrize("name", ["single_tor", "paper_testbed", "two_hosts", "hsdp"])
def test_the_line_for_people_starts_the_torchrun_of_each_rank(name: str) -> None:
    """The shell itself expands the line."""
    topology = load(name)
    script = ["train.py", "--title", "two words"]
    line = torchrun.loop(topology, "lab exec mine", script)
    shell_script = line.replace("lab exec", "printf '%s\\0'").replace(" & ", "; echo; ")
    result = subprocess.run(["sh", "-c", shell_script], capture_output=True, text=True, check=True)
    rows = [row.split("\0")[:-1] for row in result.stdout.splitlines()]
    for host, row in zip(topology.trainers, rows, strict=True):
        expected = [str(word) for word in torchrun.command(topology, host, script)]
        assert row == ["mine", host.name, "--", *expected]


def test_the_labs_that_come_with_checkmate(tmp_path: Path) -> None:
    with_switches = ["hsdp", "paper_testbed", "single_tor", "trees", "two_hosts", "two_stages", "two_tor"]
    assert describe.names() == ["ddp_hosts", "fsdp_hosts", *with_switches]
    single, two, paper = (load(name) for name in ("single_tor", "two_tor", "paper_testbed"))
    assert (len(single.ranks), [len(n.interfaces) for n in single.shadow_nodes]) == (4, [2, 2])
    assert [len(group.ranks) for group in paper.groups] == [6, 6]
    assert [len(n.interfaces) for n in paper.shadow_nodes] == [2, 2, 2, 2]
    (job,) = read_jobs([write(two, tmp_path)])
    tagging = {stream.boundary.switch for stream in streams(job)}
    holding = {nic.switch for node in job.shadow_nodes for nic in node.nics}
    assert tagging == holding == {"tor0", "tor1"}
    assert Network([job]).tree_ports("tor0") == {5}


def test_each_lab_trains_with_an_example_that_there_is() -> None:
    scripts = {name: load(name).script for name in describe.names()}
    assert all(flag == "-m" and find_spec(module) for flag, module in scripts.values())
    assert scripts["ddp_hosts"] == scripts["single_tor"] and scripts["fsdp_hosts"] == scripts["hsdp"]
    assert {scripts["hsdp"][1], scripts["two_stages"][1]} == {
        "checkmate.examples.hsdp",
        "checkmate.examples.pipeline",
    }


@pytest.mark.parametrize(
    ("changes", "example"),
    [
        ({"dp_groups": [{"ranks": ["tor"] * 3}]}, "gpt.train"),
        ({"dp_groups": [{"ranks": ["tor"] * 2}] * 2}, "pipeline"),
        ({"dp_groups": [{"ranks": ["tor"] * 2}, {"ranks": ["tor"] * 3}]}, None),
        ({"dp_groups": [{"ranks": ["tor"] * 2}] * 3}, None),
        ({"dp_groups": [{"ranks": ["tor"] * 2}] * 3, "example": "gpt.train"}, "gpt.train"),
        ({"hosts": [["tor"]] * 2, "dp_groups": [{"hosts": [0, 1]}] * 2}, "gpt.train"),
        ({"hosts": [["tor"]] * 2, "gpus_per_host": 2, "mesh": {"dp_replicate": 2, "dp_shard": 2}}, "hsdp"),
        ({"hosts": [["tor"]] * 4, "gpus_per_host": 1, "mesh": {"pp": 2, "dp_replicate": 2}}, None),
    ],
)
def test_a_lab_trains_the_example_that_suits_its_groups(changes: dict[str, Any], example: str | None) -> None:
    lab = build("x", {"title": "a lab", "switches": ["tor"], "shadow_nodes": [["tor"]], **changes})
    assert lab.example == example
    assert build("x", topology_data(lab)).example == example
    steps = picture.next_steps(lab, "x", "job.yaml")
    assert ("none of Checkmate's examples trains such groups" in steps) == (example is None)


@pytest.mark.parametrize(
    ("mesh", "example"),
    [
        ({"dp_replicate": 4}, "gpt.train"),
        ({"dp_shard": 4}, "hsdp"),
        ({"dp_replicate": 2, "dp_shard": 2}, None),
        ({"pp": 2, "dp_replicate": 2}, None),
    ],
)
def test_a_lab_without_switches_trains_the_example_that_suits(
    mesh: dict[str, int], example: str | None
) -> None:
    lab = build("x", {"title": "a lab", "copies": "host", "hosts": 4, "mesh": mesh, "shadow_nodes": 1})
    assert lab.example == example


@pytest.mark.parametrize("name", ["nowhere", "missing.yaml"])
def test_an_unknown_lab_is_refused(name: str) -> None:
    with pytest.raises(BadDescription, match=name):
        load(name)


def test_switch_commands() -> None:
    switch = load("two_tor").switches[1]
    ports = [part for port in range(1, 6) for part in ("-i", f"{port}@port{port}")]
    bmv2 = switches.command(switch, "bmv2", Path("/lab"))
    assert bmv2[:1] == ["simple_switch_grpc"]
    assert bmv2[1:] == [
        *("--no-p4", "--device-id", "2", *ports, "--"),
        *("--grpc-server-addr", "172.31.3.2:9559", "--cpu-port", "510"),
    ]
    plain = [part for part in bmv2[1:] if part != "--"]
    assert switches.command(switch, "softswitch", Path("/lab"))[4:] == [*plain, "--insecure"]


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5", 0.5), ("0", 0.0), ("0.5%", 0.005)])
def test_loss_is_read(text: str, share: float) -> None:
    assert loss.fraction(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["100%", "1", "-1%", "much", "%", "nan"])
def test_no_loss_is_refused(text: str) -> None:
    with pytest.raises(BadDescription, match="is not a loss rate"):
        loss.fraction(text)
