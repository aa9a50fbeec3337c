"""`checkmate nccl`: the plugin is built, and the check names what it lacks."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from checkmate.nccl.environment import environment_troubles
from testbed.jobs import job_data
from tests.support.cli import invoke


def test_the_shell_gets_the_variables_of_the_plugin(tmp_path: Path) -> None:
    code, output = invoke("nccl", "build", "--cache", tmp_path / "my cache")
    assert code == 0, output
    exports = [line.removeprefix("export ") for line in output.splitlines() if line.startswith("export ")]
    variables = dict(shlex.split(line)[0].split("=", 1) for line in exports)
    (plugin,) = (tmp_path / "my cache").iterdir()
    assert variables["NCCL_NET_PLUGIN"] == variables["NCCL_PROFILER_PLUGIN"] == str(plugin)
    assert list(environment_troubles(variables, plugin, 1)) == []


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = invoke("nccl", "build", "--cache", tmp_path)
    assert code == 1
    assert "error: the NCCL plugin needs a C compiler: apt-get install gcc" in output
    assert not list(tmp_path.iterdir())


def test_the_check_runs_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**job_data(), "collective": "nccl"}))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    code, output = invoke("nccl", "check", file)
    assert code == 2
    assert output.startswith(
        "error: MASTER_ADDR is not set: start `torchrun ... --no-python checkmate nccl check JOB`"
    )
