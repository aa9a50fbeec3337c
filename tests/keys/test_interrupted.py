"""Making keys when it is interrupted, or when the disk is full: nothing half made, nothing lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from checkmate.job.schema import Job
from checkmate.keys import disk
from checkmate.keys.errors import KeysError
from tests.support.keys import FILES, check_whole, contents, keys_of, served_job


@pytest.fixture
def job() -> Job:
    return served_job()


class Stopping:
    """Raises an exception at one flush to disk: number `at`, counted from 0."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.remaining, self.error = at, error
        self.fsync = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.remaining -= 1
        if self.remaining == -1:
            raise self.error
        self.fsync(descriptor)


def stopped(job: Job, keys: Path, at: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make keys, interrupted at a flush. Return whether there was such a flush."""
    stopping = Stopping(at, error)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stopping)
        try:
            keys_of(job, keys)
        except (KeyboardInterrupt, KeysError):
            return True
    return False


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FULL], ids=["Ctrl-C", "a full disk"])
def test_an_interrupted_first_run_leaves_all_or_nothing(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    ends = []
    for at in range(100):
        keys = tmp_path / f"keys{at}"
        if not stopped(job, keys, at, error, monkeypatch):
            break
        ends.append(keys.exists())
        if keys.exists():
            check_whole(job, keys)
    assert len(ends) == len(FILES) + 7
    assert ends == [False] * (len(ends) - 1) + [True]  # only the last flush is after the folder got its name


def test_a_full_disk_is_reported(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Stopping(3, FULL))
    with pytest.raises(KeysError, match="can't make keys: disk: No space left on device"):
        keys_of(job, tmp_path / "keys")


def test_an_interrupted_repair_loses_nothing_and_is_completed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(100):
        keys = tmp_path / f"keys{at}"
        keys_of(job, keys)
        shutil.rmtree(keys / "gpt/trainer")
        for name in ("shadow/key.pem", "controller/hello.key", "reader/cert.pem"):
            (keys / "gpt" / name).unlink()
        before = contents(keys / "gpt")
        interrupted = stopped(job, keys, at, KeyboardInterrupt(), monkeypatch)
        after = contents(keys / "gpt")
        assert not {name for name in before if after.get(name) != before[name]} - {"shadow/cert.pem"}
        assert {path.name for path in keys.iterdir()} == {"gpt"}
        keys_of(job, keys)
        check_whole(job, keys)
        for name in before.keys() - {"shadow/cert.pem"}:
            assert contents(keys / "gpt")[name] == before[name]
        if not interrupted:
            assert at > 10
            return
    pytest.fail("it never ends")


def test_what_a_killed_run_has_left_is_removed(job: Job, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with disk.workspace(tmp_path / "keys") as work:
            (work / "file").write_text("secret")
            os.write(writer, b"!")
            os.kill(os.getpid(), 9)
    os.read(reader, 1)
    os.waitpid(child, 0)
    assert [path.name.startswith(".unfinished-") for path in (tmp_path / "keys").iterdir()] == [True]
    keys_of(job, tmp_path / "keys")
    check_whole(job, tmp_path / "keys")
