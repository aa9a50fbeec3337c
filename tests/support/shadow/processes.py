"""Shadow nodes as processes of their own: to kill, to stop for a while, and to read what they say."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from checkmate.job.schema import Job

Start = Callable[..., "NodeProcess"]
"""Starts a shadow node of a job, with further arguments; it ends with the test."""


class NodeProcess:
    """`checkmate shadow` as a process, with `--json`; its lines are read as they come."""

    def __init__(self, file: Path, node: int, *arguments: str) -> None:
        command = [sys.executable, "-m", "checkmate.cli.entry", "shadow", str(file), "--id", str(node)]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Its exit status, and what it wrote to standard error."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=20)
        return self.process.returncode, err


def start_in(folder: Path, made: list[NodeProcess]) -> Start:
    """Start nodes whose job files are in a folder, and note them in `made`."""

    def start(job: Job, node: int, *arguments: str) -> NodeProcess:
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
        made.append(NodeProcess(file, node, *arguments))
        return made[-1]

    return start
