"""The embedded target as a process without ports, for P4Runtime sessions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from checkmate.job.schema import Switch
from checkmate.job.validation import of_data
from testbed.jobs import job_data
from testbed.jobs import switch as switch_data
from testbed.ports import free_port

LOOP = asyncio.new_event_loop()
"""One for all tests, because grpc.aio does not support several loops in one process well."""


def job_on(switch: Switch, folder: Path) -> Path:
    """Write a job file whose only switch is this one; return its path."""
    data = job_data()
    data["fabric"]["switches"][0] |= {"name": switch.name, "address": switch.address}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@contextlib.contextmanager
def softswitch(*arguments: str | Path) -> Iterator[Switch]:
    """Run a switch process on a loopback port, and yield its description for a job."""
    port = free_port()
    address = ["--grpc-server-addr", f"127.0.0.1:{port}", "--device-id", "1", "--cpu-port", "510"]
    process = subprocess.Popen(
        [sys.executable, "-m", "softswitch", *address, *map(str, arguments)], stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield of_data(Switch, switch_data("tor0", 0, port=port))
    finally:
        process.terminate()
        assert process.wait(10) == 0
