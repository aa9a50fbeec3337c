"""What commands with `--plot` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from checkmate.cli.common import UsageFault, err

_ENDINGS = (".png", ".svg")

PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Write the figures: FILE.png or FILE.svg.", metavar="FILE")
]


def check_picture(file: Path) -> None:
    """Before anything is worked out: whether the picture can be drawn, and be where it is wanted."""
    if file.suffix.lower() not in _ENDINGS:
        raise UsageFault(f"--plot: {file} must end in {' or '.join(_ENDINGS)}")
    if file.is_dir() or not file.parent.is_dir():
        why = "is a folder" if file.is_dir() else f"would be in {file.parent}, which is no folder"
        raise UsageFault(f"--plot: {file} {why}")
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError:
        raise UsageFault('--plot draws with matplotlib, which needs: pip install ".[plan]"') from None


def draw(file: Path, write: Callable[[], None]) -> None:
    """Write a picture; `UsageFault` where it can't be."""
    try:
        with err.status("drawing", spinner="line"):
            write()
    except OSError as error:
        raise UsageFault(f"--plot: {file} can't be written: {error.strerror}") from None
