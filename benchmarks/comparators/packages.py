"""Packages of others that are compared: `make comparators` installs them beside the project's own.

They are not in the virtual environment, because lm-resiliency has every torchrun there print a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[2] / "build" / "comparators"


def is_installed(package: str) -> bool:
    """Return whether a package is there: not every machine can install it."""
    return (FOLDER / package).is_dir()


def use() -> None:
    """Let this process import them."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
