"""`checkmate keys`: the keys of jobs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from checkmate.cli.main import app
from checkmate.keys.folder import read_keys
from checkmate.keys.roles import Role
from testbed.jobs import job_data
from tests.support.cli import invoke
from tests.support.keys import contents


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """Return a folder with the files of two jobs."""
    for number, name in enumerate(("gpt", "llama")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(job_data(name, nodes=2, number=number)))
    return tmp_path


def plain(text: str) -> str:
    return " ".join(text.split())


def test_each_job_gets_keys_beside_its_file(jobs: Path) -> None:
    code, output = invoke("keys", jobs)
    assert code == 0
    for job in ("gpt", "llama"):
        assert f"keys of job {job}: {jobs}/keys/{job}/" in plain(output)
        for role in Role:
            read_keys(jobs / "keys" / job / role, job, role)
    assert (plain(output).count("nowhere: stays"), plain(output).count("authority/")) == (2, 2)
    code, again = invoke("keys", jobs)
    assert (code, plain(again).count("key.pem")) == (0, 8)
    assert "Traceback" not in again


def test_keys_are_made_where_the_job_has_them(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    file.write_text(yaml.safe_dump({**job_data("gpt", nodes=2), "keys": "secrets"}))
    code, output = invoke("keys", file, "--json")
    assert code == 0
    assert json.loads(output)["keys"][0]["folder"] == str(tmp_path / "secrets/gpt")
    read_keys(tmp_path / "secrets/gpt/reader", "gpt", Role.READER)
    assert not (tmp_path / "keys").exists()


def test_the_keys_as_data(jobs: Path) -> None:
    documents = []
    for _ in range(2):
        code, output = invoke("keys", jobs / "gpt.yaml", "--out", jobs / "elsewhere", "--json")
        assert code == 0
        documents.append(json.loads(output))
    first, again = documents
    ((keys,), (kept_keys,)) = first["keys"], again["keys"]
    assert (keys["job"], keys["folder"]) == ("gpt", str(jobs / "elsewhere/gpt"))
    assert keys["authority"]["folder"] == str(jobs / "elsewhere/gpt/authority")
    assert keys["authority"]["made"] == kept_keys["authority"]["kept"] == ["ca.pem", "ca.key"]
    hosts = {role["role"]: role["hosts"] for role in keys["roles"]}
    assert hosts == {
        "controller": [],
        "trainer": ["192.168.0.0", "192.168.0.1", "192.168.0.2"],
        "shadow": ["192.168.100.0", "192.168.100.1"],
        "reader": [],
    }
    for made_role, kept_role in zip(keys["roles"], kept_keys["roles"], strict=True):
        assert made_role["made"] == kept_role["kept"] == [Path(file).name for file in made_role["made"]]
        assert made_role["kept"] == kept_role["made"] == []
        assert made_role["valid_until"] == kept_role["valid_until"]
        assert contents(Path(made_role["folder"])).keys() == set(made_role["made"])
    assert not (jobs / "keys").exists()


def test_hosts_are_where_ranks_are_on_the_management_network(tmp_path: Path) -> None:
    data = job_data("gpt", ranks=12)
    names = ["10.0.0.1", "10.0.0.2", "fd00:0::3", "10.0.0.1", "rank6.example.org"]
    for rank, name in zip(data["dp_groups"][0]["ranks"], names, strict=False):
        rank["mgmt"] = name
    del data["dp_groups"][0]["ranks"][5]["mgmt"]
    (tmp_path / "gpt.yaml").write_text(yaml.safe_dump(data))
    output = invoke("keys", tmp_path / "gpt.yaml", "--json")[1]
    trainer = json.loads(output)["keys"][0]["roles"][1]
    on_the_ring = data["dp_groups"][0]["ranks"][5]["ip"]
    assert trainer["hosts"][:5] == ["10.0.0.1", "10.0.0.2", "fd00::3", "rank6.example.org", on_the_ring]
    assert "and 3 more (--json)" in plain(invoke("keys", tmp_path / "gpt.yaml")[1])


def test_jobs_with_a_fault_get_no_keys(jobs: Path) -> None:
    (jobs / "llama.yaml").write_text("job: llama\n")
    code, output = invoke("keys", jobs)
    assert code == 2
    assert "dp_groups" in output
    assert not (jobs / "keys").exists()


def test_an_error_of_keys_is_data_too(jobs: Path) -> None:
    invoke("keys", jobs / "gpt.yaml")
    (jobs / "keys/gpt/authority/ca.key").unlink()
    result = CliRunner().invoke(app, ["keys", "--json", str(jobs)])
    error = f"{jobs}/keys/gpt/authority/ca.key is missing; put the authority's own file back"
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"version": 1, "error": error, "exit": 2, "faults": []}
    assert error in plain(result.stderr)
    assert not (jobs / "keys/llama").exists()


def test_validate_makes_nothing(jobs: Path) -> None:
    assert invoke("validate", jobs)[0] == 0
    assert not (jobs / "keys").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_leaves_nothing(jobs: Path, number: int, status: int) -> None:
    """The signal comes in the middle: when the fifth file is flushed."""
    code = (
        "import os, signal\n"
        "fsync, count = os.fsync, iter(range(100))\n"
        f"os.fsync = lambda fd: signal.raise_signal({int(number)}) if next(count) == 5 else fsync(fd)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from checkmate.cli.entry import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "keys", str(jobs)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, "Traceback" in result.stderr) == (status, False), result.stderr
    assert {path.name for path in jobs.iterdir()} == {"gpt.yaml", "llama.yaml"}
    assert invoke("keys", jobs)[0] == 0
