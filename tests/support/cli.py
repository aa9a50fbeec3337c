"""The command line: in this process, and as a process."""

from __future__ import annotations

import sys
from pathlib import Path

from typer.testing import CliRunner

from checkmate.cli.main import app

COMMAND = [sys.executable, "-m", "checkmate.cli.entry"]
"""Beginning of the command line of a `checkmate` process."""


def invoke(*arguments: str | Path) -> tuple[int, str]:
    """Run a command in this process; return its exit status and its output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output
