"""Words that a rank sends to its launcher, on a pipe that the environment names."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Final

PIPE_VARIABLE: Final = "CHECKMATE_LAUNCHER_PIPE"
"""The descriptor to which a rank writes."""
BEAT_SECONDS: Final = 1.0


class Word(StrEnum):
    """A line on the pipe."""

    ALIVE = "alive"
    """It runs: each second."""
    MET = "met"
    """It has met the other ranks, so its script works that far."""
    TRAINED = "trained"
    """It has trained an iteration."""
    CONCLUDED = "concluded"
    """All ranks are done with training: a process in its place would wait for others that have ended."""
    END = "end"
    """It says no more, and what it still does takes as long as it takes."""
    FINAL = "final"
    """It can't go on, and no process in its place could."""


class Speaker:
    """A rank's end of the pipe. Without a launcher, it says nothing."""

    def __init__(self) -> None:
        number = os.environ.get(PIPE_VARIABLE, "")
        self._pipe = int(number) if number.isdecimal() else None
        self._has_trained: Callable[[], bool] = lambda: False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, has_trained: Callable[[], bool]) -> None:
        """Say each second that the process runs, and whether it has trained an iteration, until `close`."""
        self._has_trained = has_trained
        if self._pipe is not None and self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="launcher", daemon=True)
            self._thread.start()

    def say(self, word: Word) -> None:
        """Send a word."""
        if self._pipe is not None:
            with suppress(OSError):  # the launcher has ended
                os.write(self._pipe, f"{word}\n".encode())

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.say(Word.END)

    def _beat(self) -> None:
        while True:
            self.say(Word.TRAINED if self._has_trained() else Word.ALIVE)
            if self._closing.wait(BEAT_SECONDS):
                return
