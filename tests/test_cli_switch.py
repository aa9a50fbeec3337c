"""Commands against a real switch process: what they say, as text and as data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.jobs_made import job_data


@pytest.fixture
def job_file(tmp_path: Path) -> Iterator[Path]:
    """A job, whose switch runs and holds nothing yet."""
    command = [sys.executable, "-m", "softswitch", "--no-p4", "--device-id", "1", "--cpu-port", "510"]
    command += ["--grpc-server-addr", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as switch:
        try:
            assert switch.stdout is not None
            address = switch.stdout.readline().split("P4Runtime on ")[1].split(",")[0]
            data = job_data()
            data["fabric"]["switches"][0]["address"] = address
            file = tmp_path / "job.yaml"
            file.write_text(yaml.safe_dump(data))
            yield file
        finally:
            switch.terminate()


def checkmate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "checkmate.cli.entry", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def installed(job_file: Path) -> None:
    done = checkmate("run", "--once", job_file)
    assert done.returncode == 0, done.stderr


def test_remove_tells_what_it_wrote(job_file: Path) -> None:
    installed(job_file)
    done = checkmate("remove", job_file, "--json")
    assert done.returncode == 0, done.stderr
    (name, report), *others = json.loads(done.stdout).items()
    assert (name, others) == ("tor0", [])
    assert report["updates"] > 10
    assert report["entities"] == 0
    done = checkmate("remove", job_file, "--json")
    assert json.loads(done.stdout) == {"tor0": {"updates": 0, "entities": 0}}
    done = checkmate("remove", job_file)
    assert done.stdout == "switch tor0: 0 updates written, 0 entities stay\n"


def test_waiting_in_vain_ends_with_7_and_the_status(job_file: Path) -> None:
    installed(job_file)
    status: dict[str, Any] = json.loads(checkmate("status", job_file, "--json").stdout)
    assert not any(stream["connected"] for stream in status["tor0"]["streams"])
    done = checkmate("status", job_file, "--wait", "--timeout", "0.1", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit"], found["faults"]) == (7, 7, [])
    assert found["error"].startswith("2 streams are not connected after 0.1 s, the first: job demo")
    assert found["status"] == status


def test_a_switch_without_the_program_ends_with_4(job_file: Path) -> None:
    done = checkmate("remove", job_file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit"]) == (4, 4)
    assert found["error"] in " ".join(done.stderr.split())
