"""The documentation agrees with the code: its examples work, and its tables have every key and command."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from checkmate.cli.common import print_error
from checkmate.cli.main import COMMANDS, app
from checkmate.job.fabric_file import Grant
from checkmate.job.files import read_job
from checkmate.job.following import JobFiles
from checkmate.job.schema import SWITCH_KEYS, PanelPort, Pfc
from checkmate.job.tofino.chips import FRONT_PANELS
from checkmate.job.validation import adapter
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.view import state_of
from controlplane import plan as planning
from topologies.describe.host_copies import BridgeLabFile
from topologies.describe.job_files import TARGETS
from topologies.describe.lab_file import LabFile
from topologies.describe.topology import build, load
from topologies.torchrun import RESTARTS, loop

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def first_cells(page: str) -> set[str]:
    """What stands in code in the first column of the page's tables."""
    cells = re.findall(r"^\| ([^|]*) \|", (DOCS / page).read_text(), re.MULTILINE)
    return {code for cell in cells for code in re.findall("`([^`]+)`", cell)}


def keys_of(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> set[str]:
    """Every key of a JSON schema: `dp_groups[].ranks`."""
    keys = set()
    for name, value in schema["properties"].items():
        keys.add(prefix + name)
        item = value.get("items", {}).get("$ref", "")
        if item:
            keys |= keys_of(definitions[item.rpartition("/")[2]], definitions, f"{prefix}{name}[].")
    return keys


def test_the_example_of_a_topology_works() -> None:
    lab, without_switches = (build("mine", yaml.safe_load(text)) for text in blocks("lab.md", "yaml"))
    assert [len(group.ranks) for group in lab.groups] == [3, 2]
    assert [len(node.interfaces) for node in lab.shadow_nodes] == [2, 1]
    assert replace(without_switches, name="fsdp_hosts") == load("fsdp_hosts")


def test_every_key_of_a_topology_is_there() -> None:
    schemas = [adapter(kind).json_schema() for kind in (LabFile, BridgeLabFile)]
    keys = {key for schema in schemas for key in keys_of(schema, schema["$defs"])}
    assert {"dp_groups[].ranks", "shadow_nodes"} <= keys
    assert keys <= first_cells("lab.md")


def test_the_addresses_of_a_lab_are_as_written() -> None:
    lab = build("mine", yaml.safe_load(blocks("lab.md", "yaml")[0]))
    rank, shadow, switch = lab.ranks[3], lab.shadow_nodes[0], lab.switches[1]
    assert (str(rank.interface.ip), str(rank.mgmt)) == ("10.0.1.4", "172.31.1.104")
    assert (str(shadow.interfaces[1].ip), str(shadow.mgmt)) == ("10.0.2.2", "172.31.2.1")
    assert (str(switch.stub_ip), str(switch.mgmt)) == ("10.0.3.2", "172.31.3.2")
    ports = [host.interfaces[0].port for host in lab.hosts if host.interfaces[0].switch == "right"]
    assert ports == [1, 2, 3, 4]
    assert lab.links[0].b == ("right", 5)


def test_the_example_of_a_job_works(tmp_path: Path) -> None:
    job, fabric, by_hosts, on_their_way, hosts, mesh, tofino, _ = blocks("job.md", "yaml")
    (tmp_path / "fabric.yaml").write_text(fabric)
    for text, ranks in ((job, [0, 1]), (hosts, [0, 2]), (mesh, [0, 2])):
        (tmp_path / "job.yaml").write_text(text)
        assert [rank.rank for rank in read_job(tmp_path / "job.yaml").dp_groups[0].ranks] == ranks
    (tmp_path / "job.yaml").write_text(by_hosts)
    example = read_job(tmp_path / "job.yaml")
    assert [rank.rank for rank in example.dp_groups[0].ranks] == [*range(16)]
    assert example.node(1).gradients_at == ("10.0.1.2", 7100)
    (tmp_path / "job.yaml").write_text(on_their_way)
    example = read_job(tmp_path / "job.yaml")
    assert (example.encrypt, example.sending.source, example.sending.dscp) == (True, "eth1", 8)
    (tmp_path / "fabric.yaml").write_text(tofino)
    for port in range(1, 5):
        job = job.replace(f"port: {port}}}", f"port: {port}/0}}")
    (tmp_path / "job.yaml").write_text(job)
    example = read_job(tmp_path / "job.yaml")
    assert [rank.port for rank in example.dp_groups[0].ranks] == [128, 60]


def test_the_example_of_grants_fits_the_example_of_a_job(tmp_path: Path) -> None:
    job, *_, fabric = blocks("job.md", "yaml")
    (tmp_path / "fabric.yaml").write_text(fabric)
    (tmp_path / "alice").mkdir()
    file = tmp_path / "alice/gpt.yaml"
    file.write_text(job.replace("fabric: fabric.yaml", "fabric: ../fabric.yaml"))
    assert [element.job for element in JobFiles([file], tmp_path / "fabric.yaml").read().require()] == ["gpt"]
    assert {element.name for element in fields(Grant)} == set(yaml.safe_load(fabric)["grants"]["gpt"])


def test_every_key_of_a_tofino_is_there() -> None:
    keys = {*SWITCH_KEYS, "tag.priority"}
    assert keys - first_cells("job.md") <= {"name", "target", "address", "device_id", "tls"}
    text = (DOCS / "job.md").read_text()
    assert all(f"`{field.name}`" in text for model in (PanelPort, Pfc) for field in fields(model))
    assert all(board in text for board in FRONT_PANELS)


def test_every_command_is_there_and_whether_it_gives_data() -> None:
    group: Any = typer.main.get_command(app)
    commands = {name: group.get_command(None, name) for name in COMMANDS}
    for within in ("lab", "nccl"):
        commands |= {
            f"{within} {name}": subcommand for name, subcommand in commands.pop(within).commands.items()
        }
    rows = [line for line in (DOCS / "cli.md").read_text().splitlines() if line.startswith("| `")]
    for name, command in commands.items():
        row = next((row for row in rows if re.search(rf"`{name}(`| )", row.split("|")[1])), None)
        assert row is not None, f"docs/cli.md has no row for `{name}`"
        as_json = any("--json" in param.opts for param in command.params)
        assert (row.split("|")[3].strip().startswith("yes")) == as_json, name


def test_the_example_of_an_error_has_the_keys_that_errors_have(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("cli.md", "json")
    print_error("1 fault", 2)
    assert json.loads(example).keys() == json.loads(capsys.readouterr().out).keys()


def test_the_targets_are_there() -> None:
    assert all(target in (DOCS / "lab.md").read_text() for target in TARGETS)


def test_the_glossary_has_what_a_plan_counts_and_the_states_of_a_hold() -> None:
    words = first_cells("glossary.md")
    assert set(planning.limits("softswitch")) <= words
    rows = re.findall(r"^\| ([^|]*) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    glossary_words = {word for row in rows for word in row.split(", ")}
    holds = [(pb.HoldStatus(doubtful=True), False), (pb.HoldStatus(live=True), True)]
    holds += [(pb.HoldStatus(live=True), False), (pb.HoldStatus(), False)]
    states = {state_of(hold, fenced).plain for hold, fenced in holds}
    assert len(states) == 4
    assert states <= glossary_words


def test_restarts_are_the_same_number_everywhere() -> None:
    files = [*DOCS.rglob("*.md"), DOCS.parent / "checkmate" / "examples" / "gpt" / "train.py"]
    numbers = {n for file in files for n in re.findall(r"--max-restarts[= ](\d+)", file.read_text())}
    printed = re.findall(r"--max-restarts[= ](\d+)", loop(load("single_tor"), "lab exec try", ["train.py"]))
    assert numbers == set(printed) == {str(RESTARTS)}


def test_the_promises_of_the_security_page_name_tests_that_there_are() -> None:
    page = (DOCS / "security.md").read_text().partition("## The tests of these promises")[2]
    promises = re.findall(r"\]\(\.\./([\w/.]+)\): ((?:`\w+`(?:, )?)+)", page)
    assert len(promises) > 30
    for file, names in promises:
        text = (DOCS.parent / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", text, re.MULTILINE), f"{file}: {name}"
