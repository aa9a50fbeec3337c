"""The command line: help with examples, exit codes, data for scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from checkmate.cli.common import show_errors
from checkmate.cli.main import app
from checkmate.job import yaml_lines
from checkmate.job.schema import JOB_VARIABLE
from testbed.jobs import job_data
from tests.support.cli import COMMAND, invoke


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(nodes=2, channels=2, replicas=2)))
    return file


def test_no_command_needs_scapy() -> None:
    code = (
        "import sys; sys.modules['scapy'] = None; from importlib import import_module; "
        "from checkmate.cli.main import COMMANDS; "
        "[import_module(f'checkmate.cli.{module}') for module in COMMANDS.values()]"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()


def test_validate_counts_what_a_job_has(job_file: Path) -> None:
    code, output = invoke("validate", job_file)
    assert code == 0
    assert "demo: valid; 1 DP group, 3 ranks, 2 shadow nodes, 2 channels, 16 streams" in " ".join(
        output.split()
    )
    code, output = invoke("validate", job_file, "--json")
    assert (code, json.loads(output)) == (
        0,
        {"version": 1, "valid": True, "faults": [], "notes": [], "jobs": ["demo"]},
    )


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


@pytest.mark.parametrize("shared", [False, True])
def test_tls_files_that_do_not_exist_are_faults(tmp_path: Path, shared: bool) -> None:
    """Of `validate` only: a plan needs no switch."""
    data = job_data()
    data["fabric"]["switches"][0]["tls"] = {"ca": "ca.pem"}
    file = place = tmp_path / "job.yaml"
    if shared:
        place = tmp_path / "fabric.yaml"
        place.write_text(yaml.safe_dump(data["fabric"], sort_keys=False, default_flow_style=False))
        data["fabric"] = "fabric.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False, default_flow_style=False))
    line = 1 + next(n for n, text in enumerate(place.read_text().splitlines()) if "ca.pem" in text)
    code, output = invoke("validate", file)
    assert code == 2
    fault_text = (
        f"{place}:{line}: fabric.switches[0].tls.ca: {tmp_path / 'ca.pem'} cannot be read: No such file"
    )
    assert fault_text in output
    assert invoke("plan", file)[0] == 0


@pytest.mark.parametrize("command", ["validate", "plan", "status", "remove"])
def test_faults_as_data(tmp_path: Path, command: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**job_data(), "channels": 0, "colour": 1}, sort_keys=False))
    result = CliRunner().invoke(app, [command, str(file), "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == document["exit"] == 2
    assert len(result.stdout.splitlines()) == 1
    assert document["error"] == "2 faults in the job files"
    assert [fault["path"] for fault in document["faults"]] == ["channels", "colour"]
    line = document["faults"][0]["line"]
    assert file.read_text().splitlines()[line - 1] == "channels: 0"
    assert document["faults"][0]["file"] == str(file)
    assert document.get("valid") is (False if command == "validate" else None)
    assert "channels: must be" in result.stderr


@pytest.mark.parametrize("command", ["validate", "plan", "status", "remove"])
def test_other_errors_as_data(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, str(tmp_path), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "version": 1,
        "error": f"no job file (*.yaml) in {tmp_path}",
        "exit": 2,
        "faults": [],
    }


def test_the_errors_of_labs_as_data() -> None:
    result = CliRunner().invoke(app, ["lab", "run", "nowhere", "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["exit"], document["faults"]) == (2, 2, [])
    assert "no lab 'nowhere'" in document["error"]


@pytest.mark.parametrize("command", ["validate", "plan", "consolidate", "doctor", "reset", "drain"])
def test_the_job_of_scripts_is_that_of_commands_by_default(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_VARIABLE, str(tmp_path / "none.yaml"))
    more = {"consolidate": ["--out", str(tmp_path / "out")], "drain": ["--id", "0"]}.get(command, [])
    result = CliRunner().invoke(app, [command, *more])
    assert result.exit_code == 2 and "none.yaml" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--json"], "Missing argument 'JOB'."),
        (["shadow", "a.yaml", "--id", "x", "--json"], "'--id': must be a valid integer"),
        (["plan", "--json", "--colour"], "No such option: --colour"),
        (["lab", "rub", "--json"], "No such command 'rub'"),
    ],
)
def test_a_wrong_command_line_as_data(arguments: list[str], words: str) -> None:
    result = entry(*arguments)
    document = json.loads(result.stdout)
    assert (result.returncode, document["exit"], document["faults"]) == (2, 2, [])
    assert words in document["error"]
    assert "Usage: " in result.stderr


def test_a_result_with_another_status_is_not_reported_as_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of `lab run` if streams differ: the document is the result."""

    @show_errors
    def command(as_json: bool) -> None:
        raise typer.Exit(9)

    with pytest.raises(typer.Exit) as excinfo:
        command(as_json=True)
    assert excinfo.value.exit_code == 9
    assert tuple(capsys.readouterr()) == ("", "")


def test_the_entry_has_the_commands_exit_status(job_file: Path, tmp_path: Path) -> None:
    assert entry("validate", job_file, "--json").returncode == 0
    assert entry("validate", "--json", "--help").returncode == 0
    assert entry("validate", tmp_path / "none.yaml", "--json").returncode == 2


def entry(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the console script as a process."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_capacity_is_checked_where_another_file_is_faulty(tmp_path: Path) -> None:
    write_large(tmp_path / "large.yaml")
    (tmp_path / "wrong.yaml").write_text("job: wrong\n")
    result = CliRunner().invoke(app, ["validate", str(tmp_path), "--json"])
    faults = json.loads(result.stdout)["faults"]
    assert [(Path(fault["file"]).name, fault["path"]) for fault in faults] == [
        ("large.yaml", "dp_groups"),  # boundaries
        ("large.yaml", "dp_groups"),  # incarnations
        ("wrong.yaml", "fabric"),
        ("wrong.yaml", "dp_groups"),
        ("wrong.yaml", "shadow_nodes"),
    ]


def write_large(file: Path) -> None:
    """Write a job with more boundaries than a switch can hold."""
    data = job_data(groups=140, ranks=2, nodes=1, channels=1, number=0)
    for index, host in enumerate([r for g in data["dp_groups"] for r in g["ranks"]]):
        host["port"] = index
    for index, nic in enumerate(data["shadow_nodes"][0]["nics"]):
        nic["port"] = 500 + index
    file.write_text(yaml.safe_dump(data))


def test_more_than_a_table_holds_is_bad_input(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    write_large(file)
    code, output = invoke("validate", file)
    assert code == 2
    assert "280 incarnations entries needed, it holds 256" in " ".join(output.split())
    assert ": dp_groups: switch tor0" in " ".join(output.split())
    for command in ("validate", "plan"):
        result = CliRunner().invoke(app, [command, str(file), "--json"])
        assert result.exit_code == 2
        faults = json.loads(result.stdout)["faults"]
        assert [fault["message"].split(" entries")[0][-14:] for fault in faults] == [
            "280 boundaries",
            "0 incarnations",
        ]
        for fault in faults:
            assert file.read_text().splitlines()[fault["line"] - 1].startswith("dp_groups")


def test_a_folder_without_jobs_is_refused(tmp_path: Path) -> None:
    code, output = invoke("plan", tmp_path)
    assert code == 2
    assert "no job file" in output


def test_plan_as_data_has_every_entity(job_file: Path) -> None:
    code, output = invoke("plan", job_file, "--json")
    assert code == 0
    plan = json.loads(output)["switches"]["tor0"]
    assert plan["usage"]["replication"] == sum(e["table"] == "replication" for e in plan["entries"]) == 8
    assert len(plan["streams"]) == plan["usage"]["streams"] == 16
    assert {"id": 1, "replicas": [{"port": p, "instance": 0} for p in range(1, 8)]} in plan["groups"]


def test_plan_reads_a_job_once_and_names_limits_beside_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may come from a pipe, and a fault in one file hides no limit that another one exceeds."""
    reads: list[Path] = []
    read = yaml_lines.read_document

    def read_and_note(file: Path, regular: bool = False) -> yaml_lines.Document:
        reads.append(file)
        return read(file, regular=regular)

    monkeypatch.setattr(yaml_lines, "read_document", read_and_note)
    data = job_data()
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    assert invoke("plan", file)[0] == 0
    assert len(reads) == 1
    write_large(tmp_path / "large.yaml")
    (tmp_path / "faulty.yaml").write_text("job: faulty\n")
    status, output = invoke("plan", tmp_path / "large.yaml", tmp_path / "faulty.yaml")
    assert status == 2
    words = " ".join(output.split())
    assert "faulty.yaml:1: fabric: is missing" in words
    assert "280 incarnations entries needed, it holds 256" in words


def test_plan_for_people_says_what_is_used_and_held(job_file: Path) -> None:
    code, output = invoke("plan", job_file, "--entries")
    assert code == 0
    assert "tor0 (softswitch)" in output
    assert "boundaries[port=1 source=10.0.0.1 destination=10.0.0.2] -> enter(boundary=0)" in output
    assert "replication[boundary=0 shadow_id=0 channel=0]" in output


def test_an_unreachable_switch_ends_with_3(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.p4runtime.connection.REACH_SECONDS", 0.3)
    data = yaml.safe_load(job_file.read_text())
    data["fabric"]["switches"][0]["address"] = "127.0.0.1:1"
    job_file.write_text(yaml.safe_dump(data))
    code, output = invoke("status", job_file)
    assert code == 3
    assert "127.0.0.1:1 doesn't answer" in " ".join(output.split())
    for command in ("status", "remove"):
        result = CliRunner().invoke(app, [command, str(job_file), "--json"])
        document = json.loads(result.stdout)
        assert (result.exit_code, document["exit"], document["faults"]) == (3, 3, [])
        assert "127.0.0.1:1 doesn't answer" in document["error"]


def test_shell_says_what_is_missing(job_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("checkmate.cli.shell.ENVIRONMENT", tmp_path)
    code, output = invoke("shell", job_file)
    assert code == 2
    assert "checkmate shell --install" in output
    code, output = invoke("shell")
    assert code == 2
    assert "specify a job file" in output


@pytest.mark.parametrize(("options", "warns"), [([], False), (["--primary"], True)])
def test_the_shell_warns_before_it_displaces_a_controller(
    job_file: Path, tmp_path: Path, options: list[str], warns: bool
) -> None:
    """Run it in a separate process, because the shell replaces the command."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho started with $@\n")
    python.chmod(0o755)
    code = (
        "import pathlib, sys; from checkmate.cli import main, shell; "
        "shell.ENVIRONMENT = pathlib.Path(sys.argv.pop()); main.app()"
    )
    command = [sys.executable, "-c", code, "shell", str(job_file), *options, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("started with -P -m p4runtime_sh --grpc-addr 127.0.0.1:9559")
    warning = (
        "displaces any other controller of tor0: a `checkmate run` that serves it ends with exit status 5"
    )
    assert (warning in result.stderr) == warns
    assert len(result.stderr.splitlines()) == warns


def test_lab_list_names_what_comes_with_checkmate() -> None:
    code, output = invoke("lab", "list")
    assert code == 0
    for name in ("single_tor", "two_tor", "paper_testbed"):
        assert f"\n{name} " in output
    assert "the paper's testbed as 2 pipeline stages" in " ".join(output.split())
