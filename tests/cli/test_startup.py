"""Commands that need no tensors do not import PyTorch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.jobs import job_data
from tests.support.job_files import write

_SCRIPT = """
import sys
from checkmate.cli.main import app
app(sys.argv[1:], standalone_mode=False)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "arguments", ["--help", "validate JOB", "plan JOB", "sysctl JOB --role trainer", "lab --help", "lab list"]
)
def test_a_command_starts_without_torch(arguments: str, tmp_path: Path) -> None:
    job = str(write(tmp_path, job_data()))
    command = [sys.executable, "-c", _SCRIPT, *(job if word == "JOB" else word for word in arguments.split())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), done.stderr
