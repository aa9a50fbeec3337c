"""Tests keep their jobs apart from the user's, and share all else in the user's cache. A plugin of pytest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from checkmate.cache import cache_folder


def pytest_configure(config: pytest.Config) -> None:
    """Make a cache for this run, with links to what is in the user's but checked jobs."""
    if hasattr(config, "workerinput"):
        return  # a worker of xdist has that of the process that started it
    theirs = cache_folder()
    ours = Path(tempfile.mkdtemp(prefix="checkmate-cache-"))
    config.add_cleanup(lambda: shutil.rmtree(ours))
    (ours / theirs.name).mkdir()
    _link(ours, theirs.parent, {theirs.name})
    _link(ours / theirs.name, theirs, {"jobs"})
    os.environ["XDG_CACHE_HOME"] = str(ours)


def _link(folder: Path, to: Path, but: Iterable[str]) -> None:
    if to.is_dir():
        for one in to.iterdir():
            if one.name not in but:
                (folder / one.name).symlink_to(one)
