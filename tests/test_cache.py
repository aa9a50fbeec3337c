"""Code in the cache: another user's is never run."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from checkmate.base import cache
from checkmate.base.cache import compiled

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have files of other users")
NOBODY = 65534


@pytest.fixture
def build(tmp_path: Path) -> Callable[[Path | None], Path]:
    """Return a function that compiles a copy of a file into a cache."""
    source = tmp_path / "source"
    source.write_text("ours")

    def copied(folder: Path | None) -> Path:
        script = 'shift; cp "$0" "$1"'
        return compiled("code.so", [source], (), lambda: ["sh", "-c", script, str(source)], folder)

    return copied


def give_to_nobody(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


@needs_root
@pytest.mark.parametrize("change", [give_to_nobody, open_to_all])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_that_others_can_change_is_not_used(
    build: Callable[[Path | None], Path],
    change: Callable[[Path], None],
    depth: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(cache, "_candidates", lambda: [cache.cache_folder()])
    cache._passing.cache_clear()
    first = build(None)
    assert first.parent == tmp_path / "user" / "checkmate"
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    first.write_text("a stranger's")
    change([first.parent, first.parent.parent][depth])
    with pytest.raises(PermissionError, match="another user can write to"):
        build(first.parent)
    second = build(None)
    assert second.parent != first.parent
    assert second.read_text() == "ours"
    assert build(None) == second
    cache._passing.cache_clear()


@needs_root
def test_roots_own_cache_takes_the_place_of_a_users(
    build: Callable[[Path | None], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user := tmp_path / "user").mkdir()
    give_to_nobody(user)
    (home := tmp_path / "root").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(user))
    monkeypatch.setattr(cache, "_candidates", lambda: [cache.cache_folder(), home / ".cache" / "checkmate"])
    assert build(None).parent == home / ".cache" / "checkmate"


@needs_root
def test_a_strangers_file_in_the_own_cache_is_refused(
    build: Callable[[Path | None], Path], tmp_path: Path
) -> None:
    code = build(tmp_path / "cache")
    give_to_nobody(code)
    with pytest.raises(PermissionError, match="another user can write to"):
        build(tmp_path / "cache")
    code.unlink()
    code.symlink_to(tmp_path / "source")
    assert build(tmp_path / "cache") == code  # our own link, in our own folder, to our own file
    give_to_nobody(tmp_path / "source")
    with pytest.raises(PermissionError, match="another user can write to"):
        build(tmp_path / "cache")
