"""Draw layers.svg from pyproject.toml's import-linter contract: `python docs/pictures/layers.py`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

from svg import arrow, box, text, write

FOLDER: Final = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"
WIDTH, HEIGHT, GAP = 760, 32, 12
COLUMNS, INNER_GAP = 3, 3
"""How many packages stand side by side, so that their names fit, and the gap between rows of one layer."""
LEFT, TOP = 60, 44


def layers() -> list[list[str]]:
    """Return the first contract's layers, highest first, each with its packages."""
    contracts = tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]["contracts"]
    return [re.split(r" [|:] ", layer) for layer in contracts[0]["layers"]]


def main() -> None:
    """Write the picture."""
    found = layers()
    parts = [text(LEFT + WIDTH / 2, 26, "each layer imports only from the layers below it", "label")]
    y = TOP
    for packages in found:
        for first in range(0, len(packages), COLUMNS):
            row = packages[first : first + COLUMNS]
            width = (WIDTH - GAP * (len(row) - 1)) / len(row)
            for column, package in enumerate(row):
                parts.append(box(LEFT + column * (width + GAP), y, width, HEIGHT, package))
            y += HEIGHT + INNER_GAP
        y += GAP - INNER_GAP
    bottom = y - GAP
    parts.append(arrow([(30, TOP), (30, bottom)]))
    right = LEFT + WIDTH + 30
    parts.append(
        box(right, TOP, 200, 90, "softswitch", ["imports extras alone;", "none of these imports it"])
    )
    parts.append(box(right, TOP + 120, 200, 90, "checkmate.examples", ["imports only", "what users import"]))
    write(
        FOLDER / "layers.svg",
        right + 220,
        bottom + 20,
        "Layers of packages, highest first: " + "; ".join(", ".join(packages) for packages in found),
        parts,
    )


if __name__ == "__main__":
    main()
