"""Faults in a lab's YAML file: each is reported with its location and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from checkmate.cli.main import app
from topologies.describe import topology
from topologies.describe.topology import BadTopology, build, load

GOOD: dict[str, Any] = yaml.safe_load((topology.FOLDER / "two_tor.yaml").read_text())
RING = ["tor0", "tor1"]
NIC = [["tor0"]]
SHARED = {"hosts": [["tor0"], ["tor1"]], "dp_groups": [{"hosts": [0, 1]}]}

MESH = {"hosts": [["tor0"], ["tor1"]], "mesh": {"dp_replicate": 2, "dp_shard": 2}, "gpus_per_host": 2}


def faults_of(change: dict[str, Any]) -> list[tuple[str, str]]:
    """Return location and message of the faults of a valid lab after a change; a mesh replaces groups."""
    good = {key: value for key, value in GOOD.items() if not (key == "dp_groups" and "mesh" in change)}
    with pytest.raises(BadTopology) as excinfo:
        build("bad", good | change)
    return [(fault.path, fault.message) for fault in excinfo.value.faults]


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"chanels": 2}, "chanels", "unknown key; did you mean channels?"),
        ({"title": ""}, "title", "must describe the lab in a few words"),
        ({"channels": 9}, "channels", "must be from 1 to 8, not 9"),
        ({"switches": ["tor0", "tor1", "tor0"]}, "switches[2]", "'tor0' is switches[0] already"),
        ({"switches": ["tor0", "tor1", "Leaf"]}, "switches[2]", "a switch's name: up to 12 of a-z and 0-9"),
        (
            {"switches": ["tor0", "tor1", "leaf"]},
            "switches[2]",
            "no link joins 'leaf' to 'tor0'; add one to links, or remove it",
        ),
        ({"links": []}, "switches[1]", "no link joins 'tor1' to 'tor0'; add one to links"),
        ({"links": [RING, ["tor1", "tor1"]]}, "links[1]", "joins two switches, not 'tor1' to itself"),
        (
            {"links": [RING, ["tor1", "leaf"]]},
            "links[1][1]",
            "no switch 'leaf' in switches; there are tor0, tor1",
        ),
        ({"links": [RING] * 151}, "links", "may have at most 150, has 151"),
        ({"dp_groups": [{"hosts": [0, 1]}]}, "dp_groups[0].hosts", "no hosts, so list ranks here, not hosts"),
        ({"dp_groups": [{"shadow_nodes": [0]}]}, "dp_groups[0].ranks", "has no hosts, so list ranks here"),
        ({"hosts": [RING, ["tor0"]]}, "dp_groups[0].ranks", "has hosts, so list hosts here, not ranks"),
        (SHARED | {"hosts": [["tor0"], ["top"]]}, "hosts[1][0]", "no switch 'top'"),
        (SHARED | {"hosts": [["tor0"], []]}, "hosts[1]", "needs at least 1, has 0"),
        (SHARED | {"dp_groups": [{"hosts": [0, 2]}]}, "dp_groups[0].hosts[1]", "no host 2; the lab has 2"),
        (SHARED | {"dp_groups": [{"hosts": [0, 1, 0]}]}, "dp_groups[0].hosts[2]", "host 0 has a rank"),
        (
            SHARED | {"collective": "nccl", "dp_groups": [{"hosts": [1, 0]}]},
            "dp_groups[0].hosts",
            "list hosts in ascending order",
        ),
        (SHARED | {"hosts": [["tor0"]] * 3}, "dp_groups", "the same number of ranks, but host 0 has 1"),
        ({"example": "gtp"}, "example", "must be 'gpt.train', 'hsdp' or 'pipeline', not 'gtp'"),
        (MESH | {"gpus_per_host": 0}, "gpus_per_host", "from 1 to 64, not 0"),
        (MESH | {"gpus_per_host": 1}, "mesh", "has 4 ranks, but 2 hosts with gpus_per_host: 1 have 2"),
        (
            MESH | {"mesh": {"dp_replicate": 2}},
            "mesh",
            "has 2 ranks, but 2 hosts with gpus_per_host: 2 have 4",
        ),
        (MESH | {"mesh": {"dp_replicate": 2, "ep": 2}}, "mesh.ep", "unknown key"),
        (MESH | {"hosts": None}, "hosts", "must be a list"),
        (MESH | {"dp_groups": [{"hosts": [0, 1]}]}, "dp_groups", "is what mesh describes already"),
        (MESH | {"replicas": 3}, "replicas", "3 replicas need as many shadow nodes; the job has 2"),
        (
            MESH
            | {"mesh": {"dp_replicate": 2, "dp_shard": 76}, "gpus_per_host": 38, "hosts": [["tor0"]] * 4},
            "mesh",
            "at most 150 ranks in all groups together, not 152",
        ),
        ({"dp_groups": [{"ranks": ["tor0"]}]}, "dp_groups[0].ranks", "needs at least 2, has 1"),
        (
            {"dp_groups": [{"ranks": RING}, {"ranks": ["tor0", "top"]}]},
            "dp_groups[1].ranks[1]",
            "no switch 'top'",
        ),
        (
            {"dp_groups": [{"ranks": RING * 40}] * 2},
            "dp_groups",
            "at most 150 ranks in all groups together, not 160",
        ),
        (
            {"dp_groups": [{"ranks": RING, "shadow_nodes": [1, 2]}]},
            "dp_groups[0].shadow_nodes[1]",
            "no shadow node 2 in shadow_nodes; their numbers are 0 to 1",
        ),
        (
            {"dp_groups": [{"ranks": RING, "shadow_nodes": [0, 1, 0]}]},
            "dp_groups[0].shadow_nodes[2]",
            "shadow node 0 is listed twice; each holds one shard",
        ),
        (
            {"dp_groups": [{"ranks": RING, "shadow_nodes": []}]},
            "dp_groups[0].shadow_nodes",
            "at least 1, has 0",
        ),
        (
            {"dp_groups": [{"ranks": RING, "shadow_nodes": [-1]}]},
            "dp_groups[0].shadow_nodes[0]",
            "must be at least 0",
        ),
        ({"collective": "tree", "channels": 5}, "channels", "both together 8 at most: 1 to 4"),
        ({"tree_bytes": 9}, "tree_bytes", "is for collective: tree, and this is ring: remove it"),
        ({"collective": "tree", "lossless": False}, "lossless", "false is for collective: ring"),
        ({"replicas": 3}, "replicas", "3 replicas need as many shadow nodes; dp_groups[0] has 2"),
        (
            {"replicas": 2, "dp_groups": [{"ranks": RING}, {"ranks": RING, "shadow_nodes": [1]}]},
            "replicas",
            "2 replicas need as many shadow nodes; dp_groups[1] has 1",
        ),
        (
            {"shadow_nodes": NIC * 17},
            "dp_groups[0].shadow_nodes",
            "at most 16 shadow nodes, not 17; list the ones",
        ),
        ({"shadow_nodes": [*NIC, ["tor0"] * 3]}, "shadow_nodes[1]", "may have at most 2, has 3"),
        ({"shadow_nodes": [["tor0", "spine"]]}, "shadow_nodes[0][1]", "no switch 'spine'"),
    ],
)
def test_a_fault_is_told_alone_with_its_place(change: dict[str, Any], path: str, words: str) -> None:
    ((where, message),) = faults_of(change)
    assert where == path
    assert words in message


BRIDGED: dict[str, Any] = {"title": "x", "copies": "host", "hosts": 2, "shadow_nodes": 2}


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"copies": "hosts"}, "copies", "must be 'switch' or 'host', not 'hosts'"),
        ({"switches": ["tor"]}, "switches", "is for labs with switches (copies: switch): remove it"),
        ({"dp_groups": [{"hosts": [0, 1]}]}, "dp_groups", "is for labs with switches"),
        ({"hosts": [["tor"]]}, "hosts", "must be a whole number"),
        ({"hosts": 0}, "hosts", "must be from 1 to 150, not 0"),
        ({"hosts": 50, "gpus_per_host": 4}, "hosts", "at most 150 ranks, not 200"),
        ({"mesh": {"dp_shard": 4}}, "mesh", "has 4 ranks, but 2 hosts with gpus_per_host: 1 have 2"),
        ({"replicas": 3}, "replicas", "3 replicas need as many shadow nodes; the lab has 2"),
        ({"shadow_nodes": 17}, "shadow_nodes", "at most 16 shadow nodes, not 17"),
        ({"hots": 2}, "hots", "unknown key; did you mean hosts?"),
    ],
)
def test_a_fault_of_a_lab_without_switches(change: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(BadTopology) as excinfo:
        build("bad", BRIDGED | change)
    faults = {fault.path: fault.message for fault in excinfo.value.faults}
    assert words in faults[path]
    assert len(faults) == 1 or change == {"copies": "hosts"}


@pytest.mark.parametrize("name", ["ctl", "cables", "rank1", "shadow"])
def test_names_that_the_lab_needs_are_no_switch(name: str) -> None:
    faults = faults_of({"switches": ["tor0", "tor1", name], "links": [RING, ["tor0", name]]})
    assert faults == [
        ("switches[2]", f"{name!r} is a name that the lab gives itself; use another, such as tor")
    ]


def test_one_fault_hides_no_other(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "title: x\nswitches: [tor, leaf]\nlinks: [[tor, up]]\nreplicas: many\n"
        "dp_groups:\n- ranks: [a]\n- {ranks: [tor, b], shadow_nodes: [0, 0]}\n"
        "shadow_nodes: [[tor]]\nmore: 1\n"
    )
    with pytest.raises(BadTopology) as excinfo:
        load(str(file))
    assert [(fault.file, fault.line, fault.path) for fault in excinfo.value.faults] == [
        (file, 3, "links[0][1]"),
        (file, 4, "replicas"),
        (file, 6, "dp_groups[0].ranks"),
        (file, 6, "dp_groups[0].ranks[0]"),
        (file, 7, "dp_groups[1].ranks[1]"),
        (file, 7, "dp_groups[1].shadow_nodes[1]"),
        (file, 9, "more"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title: [x", ":1: (YAML): "),
        ("title: x\ntitle: y\n", ":2: (YAML): the key 'title' is given twice"),
        ("- tor\n", ":1: (top level): is a list; it must be a mapping of keys such as title: and switches:"),
        ("title: \xe9\n".encode("latin-1"), ":1: (file): is not UTF-8: byte 0xE9; save the file as UTF-8"),
        ("switches: [tor]\n", ":1: title: is missing"),
    ],
)
def test_a_file_that_is_no_lab_is_one_message_without_a_traceback(
    tmp_path: Path, text: str | bytes, words: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = CliRunner().invoke(app, ["lab", "up", str(file)])
    assert result.exit_code == 2
    assert f"error: {file}{words}" in result.stderr
    assert "Traceback" not in result.output
