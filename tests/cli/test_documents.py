"""Each command's `--json` is as its schema describes it; the commands' own tests check further ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from checkmate.base.wording import JSON_VERSION
from checkmate.cli.main import COMMANDS, app
from checkmate.cli.schema import DOCUMENTS, names, schema_of
from testbed.jobs import job_data, tofino_job_data
from tests.support.cli import invoke
from tests.support.documents import check_document


def printed(*arguments: str | Path) -> Any:
    return json.loads(CliRunner().invoke(app, [*map(str, arguments), "--json"]).stdout)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(nodes=2, channels=2, replicas=2)))
    return file


@pytest.mark.parametrize("name", names())
def test_schemas_are_schemas(name: str) -> None:
    code, output = invoke("schema", name)
    assert code == 0
    schema = json.loads(output)
    Draft202012Validator.check_schema(schema)
    assert schema == schema_of(name)


def test_each_command_with_json_has_a_schema() -> None:
    group: Any = typer.main.get_command(app)
    commands = {name: group.get_command(None, name) for name in COMMANDS}
    commands |= {f"lab-{name}": subcommand for name, subcommand in commands.pop("lab").commands.items()}
    with_json = {
        name for name, subcommand in commands.items() if any("--json" in p.opts for p in subcommand.params)
    }
    variants = {"error", "plan-capacity", "plan-capacity-host", "plan-pfc", "plan-bfrt"}
    assert with_json == DOCUMENTS.keys() - variants


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("validate", ["validate", "JOB"]),
        ("keys", ["keys", "JOB"]),
        ("plan", ["plan", "JOB"]),
        ("sysctl", ["sysctl", "JOB", "--role", "shadow"]),
        ("sysctl", ["sysctl", "JOB", "--role", "trainer"]),
        ("plan-capacity", ["plan", "JOB", "--capacity", "--model", "ResNet50", "--node-memory", "64GB"]),
        ("cost", ["cost", "--runs", "10"]),
        ("cost", ["cost", "--runs", "0", "--every", "30min"]),
        ("lab-list", ["lab", "list"]),
        ("error", ["validate", "nowhere.yaml"]),
        ("error", ["plan", "JOB", "--capacity", "--model", "ResNet50", "--node-memory", "1MB"]),
        ("error", ["keys", "JOB", "--out", "JOB"]),
        ("error", ["sysctl", "JOB", "--role", "trainer", "--receive-buffer", "8"]),
    ],
)
def test_documents_fit_their_schemas(job: Path, name: str, arguments: list[str]) -> None:
    document = printed(*(job if argument == "JOB" else argument for argument in arguments))
    assert document["version"] == JSON_VERSION
    check_document(name, document)


@pytest.mark.parametrize(
    ("name", "options"), [("plan", []), ("plan-capacity-host", ["--capacity", "--model", "ResNet50"])]
)
def test_documents_of_copies_by_hosts_fit_their_schemas(
    tmp_path: Path, name: str, options: list[str]
) -> None:
    file = tmp_path / "job.yaml"
    nodes = [{"id": node, "mgmt": f"cpu{node}:7000"} for node in range(2)]
    file.write_text(yaml.safe_dump({"job": "mine", "copies": "host", "ranks": 8, "shadow_nodes": nodes}))
    check_document(name, printed("plan", file, *options))


@pytest.mark.parametrize("option", ["pfc", "bfrt"])
def test_documents_of_tofinos_fit_their_schemas(tmp_path: Path, option: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(tofino_job_data()))
    check_document(f"plan-{option}", printed("plan", file, f"--{option}"))


def test_what_a_schema_does_not_describe_is_refused(job: Path) -> None:
    document = printed("validate", job)
    for wrong in ({**document, "version": 2}, {**document, "colour": 1}, {"version": 1}):
        with pytest.raises(AssertionError):
            check_document("validate", wrong)
