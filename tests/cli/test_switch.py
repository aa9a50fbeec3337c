"""Commands against a real switch process: their output as text and as data."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.jobs import job_data
from tests.support.cli import COMMAND
from tests.support.documents import check_document

EXAMPLES = Path(__file__).parent.parent.parent / "softswitch" / "examples"


@contextmanager
def switch(program: str | Path = "--no-p4") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a switch, empty if no program is given; yield its address."""
    command = [sys.executable, "-m", "softswitch", str(program), "--device-id", "1", "--cpu-port", "510"]
    command += ["--grpc-server-addr", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split("P4Runtime on ")[1].split(",")[0]
        finally:
            process.terminate()


def write_job(folder: Path, *addresses: str) -> Path:
    """Write a job on the switches at these addresses."""
    data = job_data(switches=len(addresses))
    for one, address in zip(data["fabric"]["switches"], addresses, strict=True):
        one["address"] = address
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.fixture
def job_file(tmp_path: Path) -> Iterator[Path]:
    """Write a job whose switch runs and is empty."""
    with switch() as (_, address):
        yield write_job(tmp_path, address)


def checkmate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def installed(job_file: Path) -> None:
    done = checkmate("run", "--once", job_file)
    assert done.returncode == 0, done.stderr


def test_remove_tells_what_it_wrote(job_file: Path) -> None:
    installed(job_file)
    done = checkmate("remove", job_file, "--json")
    assert done.returncode == 0, done.stderr
    check_document("remove", found := json.loads(done.stdout))
    (name, report), *others = found["switches"].items()
    assert (name, others) == ("tor0", [])
    assert report["updates"] > 10
    assert report["entities"] == 0
    done = checkmate("remove", job_file, "--json")
    assert json.loads(done.stdout) == {"version": 1, "switches": {"tor0": {"updates": 0, "entities": 0}}}
    done = checkmate("remove", job_file)
    assert done.stdout == "switch tor0: 0 updates written, 0 entities stay\n"


def test_status_tells_removed_from_not_connected(job_file: Path) -> None:
    words = "job demo is not installed on switch tor0"
    installed(job_file)
    assert (
        json.loads(checkmate("status", job_file, "--json").stdout)["switches"]["tor0"]["not_installed"] == []
    )
    assert words not in checkmate("status", job_file).stdout
    assert checkmate("remove", job_file).returncode == 0
    done = checkmate("status", job_file)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "connected " not in done.stdout.partition("copies lost")[0]  # no table
    found = json.loads(checkmate("status", job_file, "--json").stdout)["switches"]["tor0"]
    assert found["not_installed"] == ["demo"]
    assert not any(stream["connected"] for stream in found["streams"])
    waited = checkmate("status", job_file, "--wait", "--timeout", "0.1")
    assert waited.returncode == 7
    assert f"{words}; 2 streams are not connected" in waited.stderr
    assert "none is at tor0: do shadow nodes run, does `checkmate run` serve" in waited.stderr


def test_waiting_in_vain_ends_with_7_and_the_status(job_file: Path) -> None:
    installed(job_file)
    status: dict[str, Any] = json.loads(checkmate("status", job_file, "--json").stdout)
    check_document("status", status)
    assert not any(stream["connected"] for stream in status["switches"]["tor0"]["streams"])
    done = checkmate("status", job_file, "--wait", "--timeout", "0.1", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit"], found["faults"]) == (7, 7, [])
    assert found["error"].startswith("2 streams are not connected after 0.1 s, the first: job demo")
    assert found["status"] == status
    check_document("error", found)


def test_a_switch_that_is_away_does_not_hide_the_others(tmp_path: Path) -> None:
    with switch() as (_, here), switch() as (other, there):
        file = write_job(tmp_path, there, here)
        installed(file)
        other.kill()
        other.wait()
        done = checkmate("status", file)
        assert (done.returncode, "switch tor1: copies lost" in done.stdout) == (3, True)
        assert there in done.stderr and here not in done.stderr
        found = json.loads(checkmate("status", file, "--json").stdout)
        assert (found["exit"], list(found["status"]["switches"])) == (3, ["tor1"])
        check_document("error", found)


def test_all_switches_that_cannot_be_read_are_named_at_once(tmp_path: Path) -> None:
    """One runs another program, one is away, one is sound: none hides another, or waits for one."""
    with switch() as (_, here), switch() as (other, there):
        file = write_job(tmp_path, there, here)
        installed(file)
        other.kill()
        other.wait()
        with switch(EXAMPLES / "l3_forward.json") as (_, foreign):
            write_job(tmp_path, foreign, here, there)
            done = checkmate("status", file)
            said = " ".join(done.stderr.split())
            assert "switch tor1: copies lost" in done.stdout
            assert ("runs another program" in said, there in said, here in said) == (True, True, False)
            assert done.returncode == 4
            write_job(tmp_path, foreign, there, "127.0.0.1:1")
            begun = time.monotonic()
            found = json.loads(checkmate("status", file, "--wait", "--timeout", "2", "--json").stdout)
            assert time.monotonic() - begun < 20
            assert [name in found["error"] for name in ("tor0", "tor1", "tor2")] == [True] * 3
            assert found["status"]["switches"] == {}
            check_document("error", found)


def test_a_switch_without_the_program_ends_with_4(job_file: Path) -> None:
    done = checkmate("remove", job_file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit"]) == (4, 4)
    assert found["error"] in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_switch_that_is_away_keeps_remove_from_the_others(tmp_path: Path) -> None:
    with switch() as (_, here), switch() as (other, there):
        file = write_job(tmp_path, here, there)
        installed(file)
        other.kill()
        other.wait()
        assert checkmate("remove", file).returncode == 3
        with switch() as (_, again):
            lines = checkmate("run", "--once", write_job(tmp_path, here, again)).stdout.splitlines()
        assert lines[0].startswith("switch tor0: 0 updates written")
