"""SIGTERM ends a test run like Ctrl-C: fixtures and blocks remove what they have made. A plugin of pytest."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType
from typing import Final, NoReturn

_CLEANING_SECONDS: Final = 60.0


def pytest_configure() -> None:
    """Have SIGTERM, which time limits send, raise `KeyboardInterrupt` in the process that runs tests."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run`, but interrupt it if it must end early, and let it clean up."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.communicate(timeout=seconds)
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=_CLEANING_SECONDS)
            finally:
                process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, *said)
