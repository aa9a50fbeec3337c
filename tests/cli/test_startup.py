"""How commands begin and end: without PyTorch if they need no tensors, and in one line if nobody can read."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.jobs import job_data
from tests.support.cli import COMMAND
from tests.support.job_files import write

_SCRIPT = """
import sys
from checkmate.cli.main import app
app(sys.argv[1:], standalone_mode=False)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [("--help", ""), ("--help", "1"), ("schema job", ""), ("plan JOB", ""), ("plan JOB --json", "1")],
)
@pytest.mark.parametrize("locale", [pytest.param("C.UTF-8", marks=pytest.mark.slow), "C"])
def test_an_output_that_cannot_be_written_is_one_line(
    arguments: str, unbuffered: str, locale: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "LC_ALL": locale}
    job = str(write(tmp_path, job_data()))
    command = [*COMMAND, *(job if word == "JOB" else word for word in arguments.split())]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment
        )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "error: the output can't be written: No space left on device"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_error_to_tell(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run(
        [*COMMAND, "schema", "job"], stdout=writer, stderr=subprocess.PIPE, check=False, env=environment
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("schema job", 0), ("validate JOB --json", 0), ("validate nowhere.yaml --json", 2), ("--no-such", 2)],
)
def test_a_command_needs_no_output(arguments: str, status: int, tmp_path: Path) -> None:
    """A supervisor may give it none."""
    line = shlex.join([*COMMAND, *arguments.replace("JOB", str(write(tmp_path, job_data()))).split()])
    result = subprocess.run(["sh", "-c", f"{line} >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr


_ENDS = """
import sys
from checkmate.cli import entry
def run():
    print("some output")
    raise SystemExit(143)
entry._run = run
entry.main()
"""


@pytest.mark.parametrize(("output", "status"), [("/dev/full", 1), ("/dev/null", 143)])
def test_what_a_signal_leaves_is_written_before_the_end(output: str, status: int) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path(output).open("w") as file:
        command = [sys.executable, "-c", _ENDS]
        result = subprocess.run(
            command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, env=environment
        )
    errors = ["error: the output can't be written: No space left on device"] * (status == 1)
    assert (result.returncode, result.stderr.splitlines()) == (status, errors)


_FULL_DISK = """
import errno, os, sys
from checkmate.cli import entry
def run():
    if "print" in sys.argv:
        try:
            print("x" * 100_000)
        except OSError:
            sys.argv.append("failed")
        assert "failed" in sys.argv
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *sys.argv[1:2])
entry._run = run
entry.main()
"""
"""With `print`, a write to the output has failed before, and nobody minds."""


def test_a_disk_that_is_full_is_not_taken_for_the_output() -> None:
    command = [sys.executable, "-c", _FULL_DISK, "/run/labs/demo", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    message = "/run/labs/demo can't be written: No space left on device"
    assert (result.returncode, result.stderr) == (1, f"error: {message}\n")
    assert json.loads(result.stdout)["error"] == message
    with Path("/dev/full").open("w") as full:
        command[-1] = "print"
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.stderr == f"error: {message}\n"


@pytest.mark.parametrize(
    "arguments", ["--help", "validate JOB", "plan JOB", "sysctl JOB --role trainer", "lab --help", "lab list"]
)
def test_a_command_starts_without_torch(arguments: str, tmp_path: Path) -> None:
    job = str(write(tmp_path, job_data()))
    command = [sys.executable, "-c", _SCRIPT, *(job if word == "JOB" else word for word in arguments.split())]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.endswith("False\n"), result.stderr
