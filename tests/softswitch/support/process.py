"""The switch as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.softswitch.support.client import DEVICE


@contextmanager
def process(
    *arguments: str, inside: str | None = None, files: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a running switch and its reported address; check that it exits with 0 after SIGTERM.

    `inside` is the namespace it runs in, and `files` the number of descriptors that it may have.
    """
    command = [sys.executable, "-m", "softswitch", "--device-id", str(DEVICE), *arguments]
    if inside:
        command = ["nsenter", f"--net=/run/netns/{inside}", *command]
    if files:
        command = ["prlimit", f"--nofile={files}", *command]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        assert running.stderr is not None
        line = running.stdout.readline()
        assert "P4Runtime on " in line, line + running.stderr.read()
        yield running, line.split("P4Runtime on ")[1].split(",")[0]
        running.send_signal(signal.SIGTERM)
        running.wait(20)
        assert running.returncode == 0, running.stderr.read()
    finally:
        running.kill()
        running.wait()


def descriptors(pid: int) -> int:
    """Return the number of files that a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
