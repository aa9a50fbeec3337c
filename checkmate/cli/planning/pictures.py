"""Option and checks that commands with `--plot` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from checkmate.cli.common import UsageFault, err

_ENDINGS = (".png", ".svg")

PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Write figures to FILE.png or FILE.svg.", metavar="FILE")
]


def check_picture(file: Path) -> None:
    """Raise `UsageFault`, before anything is computed, if the picture cannot be drawn or written."""
    if file.suffix.lower() not in _ENDINGS:
        raise UsageFault(f"--plot: {file} must end in {' or '.join(_ENDINGS)}")
    if file.is_dir() or not file.parent.is_dir():
        why = "is a folder" if file.is_dir() else f"would be in {file.parent}, which is not a folder"
        raise UsageFault(f"--plot: {file} {why}")
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError:
        raise UsageFault('--plot needs matplotlib: pip install ".[plan]"') from None


def draw(file: Path, write: Callable[[], None]) -> None:
    """Write a picture. Raise `UsageFault` if it cannot be written."""
    try:
        with err.status("drawing", spinner="line"):
            write()
    except OSError as error:
        raise UsageFault(f"--plot: {file} cannot be written: {error.strerror}") from None
