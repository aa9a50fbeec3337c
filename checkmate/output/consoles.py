"""Consoles for standard output and error, and progress on them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console, ConsoleDimensions, ConsoleOptions
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.segment import Segment
from rich.status import Status
from rich.table import Column
from rich.text import Text

from checkmate.base.wording import printable

_PIPED_WIDTH: Final = 10_000
"""Columns of an output that is not a terminal: whatever reads it gets whole lines."""
_BAR: Final = 24
_SPINNER: Final = "line"
"""One that is ASCII."""


class _OwnConsole(Console):
    """A console on which no text of others steers the terminal: the names of their files, their errors."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, "\n"))


def text_console(*, stderr: bool = False, **options: Any) -> Console:
    """Return a console for standard output or error, with plain text: no highlights, no emoji."""
    console = _OwnConsole(stderr=stderr, highlight=False, emoji=False, **options)
    if console.is_dumb_terminal:
        console.size = ConsoleDimensions(*shutil.get_terminal_size())
    elif not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def has_cursor(console: Console) -> bool:
    """Return whether what is shown can be replaced: a terminal, and not a dumb one."""
    return console.is_terminal and not console.is_dumb_terminal


LATE_SECONDS: Final = 2.0
"""After which a wait is named on what is not a terminal."""


class LateLine:
    """A line about a wait, unless that is short."""

    def __init__(self, console: Console, text: str) -> None:
        self._console, self._text = console, text
        self._timer = threading.Timer(LATE_SECONDS, self._say)
        self._timer.daemon = True

    def update(self, text: str) -> None:
        """Change what is said, if it has not been said."""
        self._text = text

    def _say(self) -> None:
        self._console.print(Text(f"{self._text} ..."), soft_wrap=True)

    def __enter__(self) -> LateLine:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def spinner(console: Console, text: str) -> Status:
    """Return a context manager that shows, on a terminal, what is being waited for."""
    target = console if has_cursor(console) else Console(quiet=True)
    return target.status(text, spinner=_SPINNER)


def spinner_or_line(console: Console, text: str) -> Status | LateLine:
    """Return a context manager that names a wait for other hosts: on a terminal at once, else after 2 s."""
    return spinner(console, text) if has_cursor(console) else LateLine(console, text)


def progress(console: Console, *more: ProgressColumn) -> Progress:
    """Return progress bars that a terminal shows as long as they are open; `more`: what is right of a bar."""
    columns = (SpinnerColumn(_SPINNER), folding("{task.description}"), BarColumn(_BAR), *more)
    return Progress(*columns, console=console, transient=True, disable=not has_cursor(console))


def folding(text: str) -> TextColumn:
    """Return a column of a progress bar that takes several lines if the terminal is narrow."""
    return TextColumn(text, markup=False, table_column=Column(overflow="fold"))
