"""The switches under test, as processes that start with the same options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from p4src.compile import CPU_PORT

TARGETS = ("softswitch", "bmv2", "tna")
STANDING = ("tofino", "tofino2")
"""Targets that cannot be started here: a file describes a running switch (`config`)."""
_FIRST_GRPC_PORT = 9559
_FIRST_THRIFT_PORT = 9090
_ROOT = Path(__file__).resolve().parents[2]


class TargetError(Exception):
    """A target that is not installed or does not start."""


def command(target: str) -> list[str]:
    """Return the command of `target`; raise `TargetError` if it is not installed."""
    if target == "softswitch":
        return [sys.executable, "-m", "softswitch"]
    if target == "tna":
        return [sys.executable, "-m", "ptf_tests.stage.tna"]
    executable = shutil.which("simple_switch_grpc")
    if executable is None:
        raise TargetError(
            "target bmv2 needs simple_switch_grpc on PATH: "
            "install BMv2 (github.com/p4lang/behavioral-model) or use --target softswitch"
        )
    return [executable]


def tied_to(parent: int) -> list[str]:
    """Return what a child's command begins with, so that it is killed with its parent, even by SIGKILL.

    The parent may die before the child has asked for that. So the shell looks who its parent is afterwards.
    """
    return ["setpriv", "--pdeathsig", "KILL", "sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(parent)]


class SwitchProcess:
    """A running switch. Switches with different `number` have different ports."""

    def __init__(self, target: str, number: int, ports: Mapping[int, str]) -> None:
        self.target = target
        self.device_id = number + 1
        self.address = f"127.0.0.1:{_FIRST_GRPC_PORT + number}"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        options = ["--no-p4", "--device-id", str(self.device_id)]
        for port, interface in ports.items():
            options += ["-i", f"{port}@{interface}"]
        if target == "bmv2":
            options += ["--thrift-port", str(_FIRST_THRIFT_PORT + number)]
        options += ["--", "--cpu-port", str(CPU_PORT), "--grpc-server-addr", self.address]
        self._process = subprocess.Popen(
            [*tied_to(os.getpid()), *command(target), *options],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def output(self) -> str:
        """Return the end of its output."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:].strip()

    def stop(self) -> None:
        """Stop it, and wait until it has ended."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
