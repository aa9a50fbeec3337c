"""Tests keep their jobs apart from the user's, and programs where they are. A plugin of pytest."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from checkmate.base.cache import cache_folder


def pytest_configure(config: pytest.Config) -> None:
    """Make a cache for this run: links to what is in the user's, but a folder of its own for checked jobs."""
    if hasattr(config, "workerinput"):
        return  # a worker of xdist has that of the process that started it
    ours = Path(tempfile.mkdtemp(prefix="checkmate-cache-"))
    (ours / "checkmate" / "jobs").mkdir(mode=0o700, parents=True)
    with suppress(OSError):  # the user has no cache, or it can't be used
        theirs = cache_folder()
        _link(ours, theirs.parent)
        _link(ours / "checkmate", theirs)
        config.add_cleanup(lambda: _give_programs(ours / "checkmate", theirs))
    config.add_cleanup(lambda: shutil.rmtree(ours, ignore_errors=True))
    os.environ["XDG_CACHE_HOME"] = str(ours)


def _link(folder: Path, to: Path) -> None:
    for one in to.iterdir():
        if not (folder / one.name).exists():
            (folder / one.name).symlink_to(one)


def _give_programs(ours: Path, theirs: Path) -> None:
    """Move what was compiled in this run to the user's cache, so that the next run need not."""
    with suppress(OSError):
        theirs.mkdir(parents=True, exist_ok=True)
        for one in ours.iterdir():
            if one.is_file() and not one.is_symlink():
                shutil.move(one, theirs / one.name)
