"""SIGTERM ends a test run like Ctrl-C: fixtures and blocks remove what they have made. A plugin of pytest."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType
from typing import Final, NoReturn

import pytest

_CLEANING_SECONDS: Final = 60.0
_MARGIN: Final = 15.0
"""For fixtures, and to end the command."""


def time_limit(seconds: float) -> pytest.MarkDecorator:
    """Return the limit of a test that calls `run` with these seconds: the command may clean up after them."""
    return pytest.mark.timeout(seconds + _CLEANING_SECONDS + _MARGIN)


def pytest_configure() -> None:
    """Have SIGTERM, which time limits send, raise `KeyboardInterrupt` in the process that runs tests."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run`, but interrupt it if it must end early, and let it clean up.

    The error has what the command said as a note.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            outputs = process.communicate(timeout=seconds)
        except BaseException as error:
            process.send_signal(signal.SIGINT)
            try:
                error.add_note("\n".join(process.communicate(timeout=_CLEANING_SECONDS)))
            except subprocess.TimeoutExpired:
                error.add_note(f"it did not end within {_CLEANING_SECONDS:.0f} s of the interrupt")
            finally:
                process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, *outputs)
