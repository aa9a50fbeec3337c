"""How commands begin and end: without PyTorch if they need no tensors, and in one line if nobody can read."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("arguments", ["--help", "schema job", "plan JOB", "plan JOB --json", "--version"])
def test_an_output_that_cannot_be_written_is_one_line(arguments: str, tmp_path: Path) -> None:
    job = str(write(tmp_path, job_data()))
    command = [*COMMAND, *(job if word == "JOB" else word for word in arguments.split())]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: the output can't be written: No space left on device"
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error_to_tell() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "schema", "job"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    "arguments", ["--help", "validate JOB", "plan JOB", "sysctl JOB --role trainer", "lab --help", "lab list"]
)
def test_a_command_starts_without_torch(arguments: str, tmp_path: Path) -> None:
    job = str(write(tmp_path, job_data()))
    command = [sys.executable, "-c", _SCRIPT, *(job if word == "JOB" else word for word in arguments.split())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), done.stderr
