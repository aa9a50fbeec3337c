"""A terminal: a process at a pseudo-terminal, and the screen that its output gives."""

from __future__ import annotations

import codecs
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from types import TracebackType
from typing import Final

_ESCAPE: Final = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")
_TO_EDGE, _TO_START, _WHOLE = 0, 1, 2


class Screen:
    """What a terminal shows, and the lines that have left it at the top.

    It knows the control codes that `rich` uses, and raises `ValueError` for any other.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._scrolled: list[str] = []
        self._lines = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._unread = ""

    def feed(self, text: str) -> None:
        """Show what a process has written; an incomplete code waits for its end."""
        text, self._unread = self._unread + text, ""
        at = 0
        while at < len(text):
            if text[at] != "\x1b":
                self._character(text[at])
                at += 1
                continue
            match = _ESCAPE.match(text, at)
            if match is None:
                if len(text) - at > 16:
                    raise ValueError(f"unknown control code: {text[at : at + 16]!r}")
                self._unread = text[at:]
                return
            self._control(*match.groups())
            at = match.end()

    def text(self) -> list[str]:
        """Return all lines since the beginning, without blanks at their ends."""
        return [*self._scrolled, *("".join(line).rstrip() for line in self._lines)]

    def _character(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        elif character.isprintable():
            if self._column == self.columns:  # wraps only now, as terminals do
                self._column = 0
                self._down()
            self._lines[self._row][self._column] = character
            self._column += 1
        else:
            raise ValueError(f"unknown control character: {character!r}")

    def _down(self) -> None:
        if self._row + 1 < self.rows:
            self._row += 1
            return
        self._scrolled.append("".join(self._lines.pop(0)).rstrip())
        self._lines.append([" "] * self.columns)

    def _control(self, private: str, numbers: str, letter: str) -> None:
        count = int(numbers) if numbers.isdigit() else 0
        if letter == "m" or (private and letter in "hl"):
            return  # colours, and whether the cursor is shown
        if letter == "A":
            self._row = max(0, self._row - max(1, count))
        elif letter == "K":
            start, end = {
                _TO_EDGE: (self._column, self.columns),
                _TO_START: (0, self._column + 1),
                _WHOLE: (0, self.columns),
            }[count]
            self._lines[self._row][start:end] = [" "] * (end - start)
        else:
            raise ValueError(f"unknown control code: {private}{numbers}{letter}")


class AtTerminal:
    """A process whose standard input, output and error are a terminal; as a context manager, it is ended."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 100,
        rows: int = 30,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = Screen(columns, rows)
        self.raw = b""
        self._fault: ValueError | None = None
        self._main, terminal = pty.openpty()
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        unset = ("COLUMNS", "LINES", "NO_COLOR", "LC_ALL", "LC_CTYPE")
        inherited = {key: value for key, value in os.environ.items() if key not in unset}
        variables = {**inherited, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(environ or {})}
        # Its controlling terminal, so that it ends with this process.
        line = ["setsid", "--ctty", *command]
        self.process = subprocess.Popen(line, stdin=terminal, stdout=terminal, stderr=terminal, env=variables)
        os.close(terminal)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            try:
                data = os.read(self._main, 1 << 16)
            except OSError:  # EIO: the process and its children have closed it
                return
            if not data:
                return
            self.raw += data
            try:
                self.screen.feed(decoder.decode(data))
            except ValueError as error:
                self._fault = error
                return

    @property
    def lines(self) -> list[str]:
        """All lines since the beginning. Raise `ValueError` if a control code was unknown."""
        if self._fault is not None:
            raise self._fault
        return self.screen.text()

    @property
    def words(self) -> str:
        """All lines, joined by single spaces: a text is in it however it was wrapped."""
        return " ".join(" ".join(self.lines).split())

    def type_keys(self, keys: str) -> None:
        """Type keys, such as "\\x04" for Ctrl-D."""
        os.write(self._main, keys.encode())

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal, and return the exit status once everything is read."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(30)
        self._reader.join(30)
        return status

    def __enter__(self) -> AtTerminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(30)
        os.close(self._main)
