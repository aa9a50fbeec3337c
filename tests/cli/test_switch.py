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
    for switch_data, address in zip(data["fabric"]["switches"], addresses, strict=True):
        switch_data["address"] = address
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
    result = checkmate("run", "--once", job_file)
    assert result.returncode == 0, result.stderr


def test_remove_tells_what_it_wrote(job_file: Path) -> None:
    installed(job_file)
    result = checkmate("remove", job_file, "--json")
    assert result.returncode == 0, result.stderr
    check_document("remove", document := json.loads(result.stdout))
    (name, report), *further = document["switches"].items()
    assert (name, further) == ("tor0", [])
    assert report["updates"] > 10
    assert report["entities"] == 0
    result = checkmate("remove", job_file, "--json")
    assert json.loads(result.stdout) == {"version": 1, "switches": {"tor0": {"updates": 0, "entities": 0}}}
    result = checkmate("remove", job_file)
    assert result.stdout == "switch tor0: 0 updates written, 0 entities stay\n"


def test_status_tells_removed_from_not_connected(job_file: Path) -> None:
    words = "job demo is not installed on switch tor0"
    installed(job_file)
    assert (
        json.loads(checkmate("status", job_file, "--json").stdout)["switches"]["tor0"]["not_installed"] == []
    )
    assert words not in checkmate("status", job_file).stdout
    assert checkmate("remove", job_file).returncode == 0
    result = checkmate("status", job_file)
    assert result.returncode == 0, result.stderr
    assert words in result.stdout
    assert "connected " not in result.stdout.partition("copies lost")[0]  # no table
    report = json.loads(checkmate("status", job_file, "--json").stdout)["switches"]["tor0"]
    assert report["not_installed"] == ["demo"]
    assert not any(stream["connected"] for stream in report["streams"])
    waited = checkmate("status", job_file, "--wait", "--timeout", "0.1")
    assert waited.returncode == 7
    assert f"{words}; 2 streams are not connected" in waited.stderr
    assert "none is at tor0: do shadow nodes run, does `checkmate run` serve" in waited.stderr


def test_waiting_in_vain_ends_with_7_and_the_status(job_file: Path) -> None:
    installed(job_file)
    status: dict[str, Any] = json.loads(checkmate("status", job_file, "--json").stdout)
    check_document("status", status)
    assert not any(stream["connected"] for stream in status["switches"]["tor0"]["streams"])
    result = checkmate("status", job_file, "--wait", "--timeout", "0.1", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["exit"], report["faults"]) == (7, 7, [])
    assert report["error"].startswith("2 streams are not connected after 0.1 s, the first: job demo")
    assert report["status"] == status
    check_document("error", report)


def test_a_switch_that_is_away_does_not_hide_the_others(tmp_path: Path) -> None:
    with switch() as (_, here), switch() as (away, there):
        file = write_job(tmp_path, there, here)
        installed(file)
        away.kill()
        away.wait()
        result = checkmate("status", file)
        assert (result.returncode, "switch tor1: copies lost" in result.stdout) == (3, True)
        assert there in result.stderr and here not in result.stderr
        report = json.loads(checkmate("status", file, "--json").stdout)
        assert (report["exit"], list(report["status"]["switches"])) == (3, ["tor1"])
        check_document("error", report)


def test_all_switches_that_cannot_be_read_are_named_at_once(tmp_path: Path) -> None:
    """One runs another program, one is away, one is sound: none hides another, or waits for one."""
    with switch() as (_, here), switch() as (away, there):
        file = write_job(tmp_path, there, here)
        installed(file)
        away.kill()
        away.wait()
        with switch(EXAMPLES / "l3_forward.json") as (_, foreign):
            write_job(tmp_path, foreign, here, there)
            result = checkmate("status", file)
            errors = " ".join(result.stderr.split())
            assert "switch tor1: copies lost" in result.stdout
            assert ("runs another program" in errors, there in errors, here in errors) == (True, True, False)
            assert result.returncode == 4
            write_job(tmp_path, foreign, there, "127.0.0.1:1")
            start = time.monotonic()
            report = json.loads(checkmate("status", file, "--wait", "--timeout", "2", "--json").stdout)
            assert time.monotonic() - start < 20
            assert [name in report["error"] for name in ("tor0", "tor1", "tor2")] == [True] * 3
            assert report["status"]["switches"] == {}
            check_document("error", report)


def test_a_switch_without_the_program_ends_with_4(job_file: Path) -> None:
    result = checkmate("remove", job_file, "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["exit"]) == (4, 4)
    assert report["error"] in " ".join(result.stderr.split())


@pytest.mark.slow
def test_a_switch_that_is_away_keeps_remove_from_the_others(tmp_path: Path) -> None:
    with switch() as (_, here), switch() as (away, there):
        file = write_job(tmp_path, here, there)
        installed(file)
        away.kill()
        away.wait()
        assert checkmate("remove", file).returncode == 3
        with switch() as (_, again):
            lines = checkmate("run", "--once", write_job(tmp_path, here, again)).stdout.splitlines()
        assert lines[0].startswith("switch tor0: 0 updates written")
