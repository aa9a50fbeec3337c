"""The user's cache, in which what takes time to make is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder: `$XDG_CACHE_HOME/checkmate`, or `~/.cache/checkmate`. It may be missing.

    Raises:
        OSError: This user has no home.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "checkmate")
    try:
        return Path.home() / ".cache" / "checkmate"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
