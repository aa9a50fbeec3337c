"""Figures as PNG or SVG files, written atomically."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("agg")

STYLE: Final[dict[Any, Any]] = {
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "0.88",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "checkmate",
}
"""Settings for `mpl.rc_context`."""


def save(figure: Figure, file: Path) -> None:
    """Save a figure, in the format of the file's extension. Equal figures give equal files."""
    kind = file.suffix[1:].lower()
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_bytes(picture.getvalue())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
