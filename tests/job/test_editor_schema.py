"""The JSON Schemas of files accept what `validate` accepts, and find faults of structure."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from checkmate.cli.schema import schema_of
from checkmate.job import checks, editor_schema
from checkmate.job.yaml_lines import read_document
from testbed.jobs import job_data, tofino_job_data
from tests.support.cli import invoke
from topologies.describe import job_files, topology

ROOT = Path(__file__).parents[2]
JOB = Draft202012Validator(editor_schema.of_job())
FABRIC = Draft202012Validator(editor_schema.of_fabric())
LAB = Draft202012Validator(schema_of("lab"))
BLOCKS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/job.md").read_text(), re.DOTALL)


def errors(validator: Draft202012Validator, data: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(data)]


@pytest.mark.parametrize("name", topology.names())
def test_what_comes_with_checkmate_fits(name: str) -> None:
    described = topology.load(name)
    assert errors(LAB, read_document(topology.FOLDER / f"{name}.yaml").data) == []
    for target in job_files.TARGETS if described.switches else ():
        assert errors(FABRIC, job_files.fabric(described, target)) == []
    assert errors(JOB, job_files.job(described, name)) == []


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_of_the_docs_fit(tmp_path: Path, number: int) -> None:
    file = tmp_path / "example.yaml"
    file.write_text(BLOCKS[number])
    data = read_document(file).data
    assert errors(JOB if "job" in data else FABRIC, data) == []


def test_generated_files_fit(tmp_path: Path) -> None:
    for target in ("softswitch", "tofino", "tofino2"):
        assert invoke("init", tmp_path / f"{target}.yaml", "--target", target)[0] == 0
        assert errors(JOB, read_document(tmp_path / f"{target}.yaml").data) == []
    assert errors(JOB, job_data(switches=3, nodes=2, replicas=2)) == []
    assert errors(JOB, tofino_job_data()) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("channels", 9),
        ("channels", "two"),
        ("colour", 1),
        ("job", "a b"),
        ("fabric", 5),
        ("fabric", ""),
        ("tag", {"dscp_bit": 3}),
        ("dp_groups", []),
        ("dp_groups/0/ranks", []),
        ("dp_groups/0/ranks/1/ip", ["10.0.0.1"]),
        ("dp_groups/0/ranks/1/mac", "01:00:00:00:00:00"),
        ("dp_groups/0/ranks/1/mac", "02:00"),
        ("dp_groups/0/ranks/1/port", "eth0"),
        ("dp_groups/0/ranks/1/port", 510),
        ("dp_groups/0/shadow_nodes", ["a"]),
        ("shadow_nodes/0/mgmt", "nowhere"),
        ("shadow_nodes/0/nics", []),
        ("fabric/switches/0/target", "tofino3"),
        ("fabric/switches/0/ports", {"eth0": 1}),
        ("fabric/switches/0/adress", "127.0.0.1:1"),
        ("fabric/links", [[{"switch": "tor0", "port": 1}]]),
    ],
)
def test_faults_of_structure_are_found(path: str, value: Any) -> None:
    data = copy.deepcopy(job_data(nodes=2))
    *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    at: Any = data
    for part in way:
        at = at[part]
    at[last] = value
    assert len(errors(JOB, data)) == 1
    assert checks.structure(data)[1] != [] or path == "fabric"


@pytest.mark.parametrize("name", ["job", "fabric", "lab"])
def test_the_command_prints_a_schema(name: str) -> None:
    code, output = invoke("schema", name)
    assert code == 0
    Draft202012Validator.check_schema(json.loads(output))
    code, output = invoke("schema", f"{name}s")
    assert (code, f"did you mean {name}?" in output) == (2, True)
