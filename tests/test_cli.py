"""The command line: help with examples, exit codes, data for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from checkmate.cli.main import app
from tests.jobs_made import job_data

COMMANDS = ["validate", "plan", "run", "status", "remove", "shell", "lab up", "lab down", "lab run"]


def invoke(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(nodes=2, channels=2, replicas=2)))
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, output = invoke(*command.split(), "--help")
    assert code == 0
    assert f"Example: checkmate {command}" in " ".join(output.split())


def test_validate_counts_what_a_job_has(job_file: Path) -> None:
    code, output = invoke("validate", job_file)
    assert code == 0
    assert "demo: valid; 1 DP groups, 3 ranks, 2 shadow nodes, 2 channels, 16 streams" in " ".join(
        output.split()
    )
    code, output = invoke("validate", job_file, "--json")
    assert (code, json.loads(output)) == (0, {"valid": True, "faults": [], "jobs": ["demo"]})


@pytest.mark.parametrize("command", ["validate", "plan", "run", "status", "remove"])
def test_bad_input_ends_with_2_and_names_each_fault(tmp_path: Path, command: str) -> None:
    data = job_data()
    data["channels"], data["dp_groups"][0]["ranks"][1]["ip"] = 0, "10.0.0.1"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    code, output = invoke(command, file)
    assert code == 2
    assert f"{file}:" in output
    assert "channels: " in output
    assert "dp_groups[0].ranks[1].ip: IP address 10.0.0.1 is taken already" in output
    assert "Traceback" not in output


def test_faults_as_data(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**job_data(), "channels": 0}))
    done = CliRunner().invoke(app, ["validate", str(file), "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 2
    assert found["valid"] is False
    assert [fault["path"] for fault in found["faults"]] == ["channels"]


def test_more_than_a_table_holds_is_bad_input(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    data = job_data(groups=140, ranks=2, nodes=1, channels=1, number=0)
    for index, host in enumerate([r for g in data["dp_groups"] for r in g["ranks"]]):
        host["port"] = index
    for index, nic in enumerate(data["shadow_nodes"][0]["nics"]):
        nic["port"] = 500 + index
    file.write_text(yaml.safe_dump(data))
    code, output = invoke("validate", file)
    assert code == 2
    assert "280 incarnations entries needed, it holds 256" in " ".join(output.split())
    assert ": dp_groups: switch tor0" in " ".join(output.split())
    for command in ("validate", "plan"):
        done = CliRunner().invoke(app, [command, str(file), "--json"])
        assert done.exit_code == 2
        (fault,) = json.loads(done.stdout)["faults"]
        assert file.read_text().splitlines()[fault["line"] - 1].startswith("dp_groups")


def test_a_folder_without_jobs_is_refused(tmp_path: Path) -> None:
    code, output = invoke("plan", tmp_path)
    assert code == 2
    assert "no job file" in output


def test_plan_as_data_has_every_entity(job_file: Path) -> None:
    code, output = invoke("plan", job_file, "--json")
    assert code == 0
    plan = json.loads(output)["tor0"]
    assert plan["usage"]["replication"] == sum(e["table"] == "replication" for e in plan["entries"]) == 8
    assert len(plan["streams"]) == plan["usage"]["streams"] == 16
    assert {"id": 1, "replicas": [{"port": p, "instance": 0} for p in range(1, 8)]} in plan["groups"]


def test_plan_for_people_says_what_is_used_and_held(job_file: Path) -> None:
    code, output = invoke("plan", job_file, "--entries")
    assert code == 0
    assert "tor0 (softswitch)" in output
    assert "replication[source=10.0.0.1 destination=10.0.0.2 shadow_id=0 channel=0]" in output


def test_an_unreachable_switch_ends_with_3(job_file: Path) -> None:
    data = yaml.safe_load(job_file.read_text())
    data["fabric"]["switches"][0]["address"] = "127.0.0.1:1"
    job_file.write_text(yaml.safe_dump(data))
    code, output = invoke("status", job_file)
    assert code == 3
    assert "127.0.0.1:1 doesn't answer" in " ".join(output.split())


def test_shell_says_what_is_missing(job_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("checkmate.cli.shell.ENVIRONMENT", tmp_path)
    code, output = invoke("shell", job_file)
    assert code == 2
    assert "checkmate shell --install" in output
    code, output = invoke("shell")
    assert code == 2
    assert "name a job file" in output
