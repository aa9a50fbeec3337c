"""The files of an event log, if others move them, or the disk is full at the start."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from checkmate.events.disk import Disk
from checkmate.events.reading import EventsError, ReadEvents, read_file
from tests.support.labs.live import needs_root

NOBODY = 65534


def test_a_file_that_was_moved_is_begun_anew_at_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    disk = Disk(path, 10)
    assert disk.write(["123456"]) == 1
    path.rename(tmp_path / "moved")
    assert disk.write(["234567", "345678"]) == 2
    assert path.read_text() == "345678\n"
    disk.close()


def test_a_folder_that_was_moved_is_made_and_locked_anew(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    disk = Disk(folder / "a.jsonl", 10)
    disk.write(["123456"])
    shutil.rmtree(folder)
    assert disk.write(["234567"]) == 1
    assert sorted(os.listdir(folder)) == [".a.jsonl.lock", "a.jsonl"]
    disk.close()


@pytest.mark.parametrize("call", ["mkdir", "open", "replace"])
def test_a_disk_that_fails_for_a_while_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "events" / "a.jsonl"
    with caplog.at_level(logging.WARNING, "checkmate"), monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        disk = Disk(path, 10)
        disk.write(["123456"])
        assert disk.write(["234567"]) == 0
    assert len(caplog.messages) == 1
    assert disk.write(["345678"]) == 1
    assert path.read_text() == "345678\n"
    disk.close()


def test_a_lock_that_another_has_taken_meanwhile_stops_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> int:
        raise EventsError("another process keeps the events")

    disk = Disk(tmp_path / "events" / "a.jsonl", 10)
    disk.write(["123456"])
    shutil.rmtree(tmp_path / "events")
    monkeypatch.setattr("checkmate.events.disk._locked", taken)
    assert disk.write(["234567"]) == 0
    disk.close()


def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(EventsError, match="it is not a file"):
        read_file(tmp_path / "a.jsonl", ReadEvents())
    with pytest.raises(EventsError, match="it is not a file"):
        Disk(tmp_path / "a.jsonl", 10)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "file", "second name"])
def test_roots_log_in_another_users_home_ends_in_no_file_of_roots(tmp_path: Path, kind: str) -> None:
    (ours := tmp_path / "ours").mkdir()
    (ours / "secret").write_text("secret")
    (home := tmp_path / "home").mkdir()
    os.chown(home, NOBODY, NOBODY)
    folder = home / "events"
    if kind == "folder":
        folder.symlink_to(ours)
    else:
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
        if kind == "file":
            (folder / "a.jsonl").symlink_to(ours / "secret")
        else:
            os.link(ours / "secret", folder / "a.jsonl")
    with pytest.raises(EventsError, match="can't be kept"):
        Disk(folder / "a.jsonl", 10)
    assert sorted(os.listdir(ours)) == ["secret"]
    assert (ours / "secret").read_text() == "secret"


@needs_root
def test_root_keeps_a_log_in_another_users_folder(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    os.chown(home, NOBODY, NOBODY)
    disk = Disk(home / "a.jsonl", 10)
    assert disk.write(["123456"] * 3) == 3
    disk.close()
    assert sorted(os.listdir(home)) == [".a.jsonl.lock", "a.jsonl", "a.jsonl.1"]
