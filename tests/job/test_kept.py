"""Checked jobs in the cache: what is kept is what was checked, and nothing else is ever taken from there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from checkmate.job import kept
from checkmate.job.files import read_checked
from checkmate.job.kept import CheckedJob, keep, read_kept
from testbed.jobs import job_data, tofino_job_data
from tests.support.job_files import meshed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkmate" / "jobs"


def written(folder: Path, data: dict[str, Any]) -> Path:
    file = folder / f"{data['job']}.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.fixture
def place(cache: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a job file, and the file in which its job is kept."""
    file = written(tmp_path, job_data())
    assert keep(file, read_checked(file))
    (there,) = cache.iterdir()
    return file, there


@pytest.mark.parametrize(
    "data", [job_data(groups=3), tofino_job_data(), meshed()], ids=["plain", "tofino", "mesh"]
)
def test_a_kept_job_is_the_one_that_was_checked(cache: Path, tmp_path: Path, data: dict[str, Any]) -> None:
    file = written(tmp_path, data)
    assert read_kept(file) is None
    checked = read_checked(file)
    assert keep(file, checked)
    assert read_kept(file) == checked
    file.write_text(file.read_text() + "# changed\n")
    assert read_kept(file) is None


def test_it_is_written_once(place: tuple[Path, Path]) -> None:
    """A home may be that of a thousand hosts."""
    file, there = place
    before = there.stat()
    checked = read_checked(file)
    assert keep(file, checked)
    assert there.stat().st_ino == before.st_ino
    file.write_text(file.read_text() + "# changed\n")
    assert keep(file, read_checked(file))
    assert there.stat().st_ino != before.st_ino


def test_nobody_else_can_read_or_write_it(place: tuple[Path, Path]) -> None:
    _, there = place
    assert (there.stat().st_mode & 0o777, there.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def others(there: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("to give a file to another user takes root")
    os.chown(there, 4321, -1)


def link(there: Path) -> None:
    there.rename(there.with_name("elsewhere"))
    there.symlink_to("elsewhere")


def folder(there: Path) -> None:
    there.unlink()
    there.mkdir()


def pipe(there: Path) -> None:
    there.unlink()
    os.mkfifo(there)


SPOILED: list[Callable[[Path], object]] = [
    others,
    link,
    lambda there: there.chmod(0o620),
    lambda there: there.chmod(0o602),
    lambda there: there.write_bytes(there.read_bytes()[:-10]),
    lambda there: there.write_bytes(b""),
    lambda there: there.write_bytes(b"[]\n"),
    lambda there: there.write_bytes(b'{"checked_by": 1}\n'),
    folder,
    pipe,
]


@pytest.mark.parametrize("spoil", SPOILED)
def test_what_may_be_of_others_or_is_not_whole_is_not_used(
    place: tuple[Path, Path], spoil: Callable[[Path], object]
) -> None:
    file, there = place
    assert read_kept(file) is not None
    spoil(there)
    assert read_kept(file) is None


class Harmful:
    """What a pickle would run."""

    ran: ClassVar[list[int]] = []

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Harmful.ran.append, (1,)


@pytest.mark.parametrize("value", [Harmful(), os.getcwd, Path, {"job": 1}, 5])
def test_it_makes_nothing_but_a_job(place: tuple[Path, Path], value: object) -> None:
    file, there = place
    head, _, _ = there.read_bytes().partition(b"\n")
    there.write_bytes(head + b"\n" + pickle.dumps(value))
    assert read_kept(file) is None
    assert Harmful.ran == []


def test_another_version_checks_it_again(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_checker", lambda: "another")
    assert read_kept(place[0]) is None


def test_a_file_that_was_written_while_it_was_read_is_not_kept(cache: Path, tmp_path: Path) -> None:
    file = written(tmp_path, job_data())
    checked = read_checked(file)
    assert not keep(file, replace(checked, files={file: None}))
    assert not cache.exists()
    assert not CheckedJob(checked.job, {file: None}).is_current()


def test_a_cache_that_cannot_be_used_is_no_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, job_data())
    (tmp_path / "cache").write_text("a file")
    assert not keep(file, read_checked(file))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert not keep(file, read_checked(file))
    assert read_kept(file) is None


def test_the_oldest_go_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "JOBS_MOST", 2)
    files = [written(tmp_path, job_data(name)) for name in ("a", "b", "c")]
    for age, file in enumerate(files):
        assert keep(file, read_checked(file))
        for one in cache.iterdir():
            os.utime(one, (one.stat().st_atime, one.stat().st_mtime - 10))
        assert len(list(cache.iterdir())) == min(age + 1, 2)
    assert [read_kept(file) is not None for file in files] == [False, True, True]
