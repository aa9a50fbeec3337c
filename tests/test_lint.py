"""`make lint` passes: ruff, mypy --strict, the layers, and the mechanical rules of English."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["lint-imports"],
        ["python", "-m", "tools.prose"],
    ],
    ids=" ".join,
)
@pytest.mark.timeout(300)
def test_lint(command: list[str]) -> None:
    program = BIN / command[0]
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
