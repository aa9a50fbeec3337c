"""Shadow nodes as processes, which tests can kill and suspend, and whose output they read."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from checkmate.job.schema import Job
from checkmate.job.validation import data_of
from tests.support.cli import COMMAND

Start = Callable[..., "NodeProcess"]
"""Function that starts a shadow node of a job, with further arguments, until the end of the test."""


class NodeProcess:
    """`checkmate shadow --json` as a process; its lines are read as they arrive."""

    def __init__(self, file: Path, node: int | None, *arguments: str) -> None:
        command = [*COMMAND, "shadow", str(file), *([] if node is None else ["--id", str(node)])]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Wait for its end; return its exit status and its standard error."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=20)
        return self.process.returncode, err


def start_in(folder: Path, processes: list[NodeProcess]) -> Start:
    """Return a function that starts nodes with job files in a folder, and adds them to `processes`."""

    def start(job: Job, node: int | None, *arguments: str) -> NodeProcess:
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(data_of(job, exclude_none=True)))
        processes.append(NodeProcess(file, node, *arguments))
        return processes[-1]

    return start
