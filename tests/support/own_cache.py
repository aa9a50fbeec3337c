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
    session_cache = Path(tempfile.mkdtemp(prefix="checkmate-cache-"))
    (session_cache / "checkmate" / "jobs").mkdir(mode=0o700, parents=True)
    with suppress(OSError):  # the user has no cache, or it can't be used
        user_cache = cache_folder()
        _link(session_cache, user_cache.parent)
        _link(session_cache / "checkmate", user_cache)
        config.add_cleanup(lambda: _give_programs(session_cache / "checkmate", user_cache))
    config.add_cleanup(lambda: shutil.rmtree(session_cache, ignore_errors=True))
    os.environ["XDG_CACHE_HOME"] = str(session_cache)


def _link(folder: Path, to: Path) -> None:
    for source in to.iterdir():
        if not (folder / source.name).exists():
            (folder / source.name).symlink_to(source)


def _give_programs(session_cache: Path, user_cache: Path) -> None:
    """Move what was compiled in this run to the user's cache, so that the next run need not."""
    with suppress(OSError):
        user_cache.mkdir(parents=True, exist_ok=True)
        for program in session_cache.iterdir():
            if program.is_file() and not program.is_symlink():
                shutil.move(program, user_cache / program.name)
