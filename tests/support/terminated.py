"""SIGTERM ends a test run like Ctrl-C: fixtures and blocks remove what they have made. A plugin of pytest."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


def pytest_configure() -> None:
    """Have SIGTERM, which time limits send, raise `KeyboardInterrupt` in the process that runs tests."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
