"""Checked jobs in the cache: what is kept is what was checked, and nothing else is ever taken from there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkmate.job import kept, yaml_lines
from checkmate.job.files import JobError, read_checked
from checkmate.job.kept import CheckedJob, checked_by, fingerprint, keep, read_kept
from checkmate.job.yaml_lines import Document
from testbed.jobs import job_data, tofino_job_data
from tests.support.job_files import meshed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkmate" / "jobs"


def write_job(folder: Path, data: dict[str, Any]) -> Path:
    file = folder / f"{data['job']}.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.fixture
def place(cache: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a job file, and the file in which its job is kept."""
    file = write_job(tmp_path, job_data())
    assert keep(file, read_checked(file))
    (there,) = cache.iterdir()
    return file, there


@pytest.mark.parametrize(
    "data", [job_data(groups=3), tofino_job_data(), meshed()], ids=["plain", "tofino", "mesh"]
)
def test_a_kept_job_is_the_one_that_was_checked(cache: Path, tmp_path: Path, data: dict[str, Any]) -> None:
    file = write_job(tmp_path, data)
    assert read_kept(file) is None
    checked_job = read_checked(file)
    assert keep(file, checked_job)
    assert read_kept(file) == checked_job
    file.write_text(file.read_text() + "# changed\n")
    assert read_kept(file) is None


def test_it_is_written_once(place: tuple[Path, Path]) -> None:
    """A home may be that of a thousand hosts."""
    file, there = place
    before = there.stat()
    checked_job = read_checked(file)
    assert keep(file, checked_job)
    assert there.stat().st_ino == before.st_ino
    file.write_text(file.read_text() + "# changed\n")
    assert keep(file, read_checked(file))
    assert there.stat().st_ino != before.st_ino


def test_nobody_else_can_read_or_write_it(place: tuple[Path, Path]) -> None:
    _, there = place
    assert (there.stat().st_mode & 0o777, there.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def give_to_another_user(there: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("to give a file to another user takes root")
    os.chown(there, 4321, -1)


def link(there: Path) -> None:
    there.rename(there.with_name("elsewhere"))
    there.symlink_to("elsewhere")


def folder_of_others(there: Path) -> None:
    give_to_another_user(there.parent)


def linked_folder(there: Path) -> None:
    there.parent.rename(there.parents[1] / "elsewhere")
    there.parent.symlink_to("elsewhere")


def folder(there: Path) -> None:
    there.unlink()
    there.mkdir()


def pipe(there: Path) -> None:
    there.unlink()
    os.mkfifo(there)


SPOILED: list[Callable[[Path], object]] = [
    give_to_another_user,
    link,
    lambda there: there.chmod(0o620),
    lambda there: there.chmod(0o602),
    lambda there: there.write_bytes(there.read_bytes()[:-10]),
    lambda there: there.write_bytes(b""),
    lambda there: there.write_bytes(b"[]\n"),
    lambda there: there.write_bytes(b'{"files": 1}\n'),
    lambda there: there.parent.chmod(0o770),
    folder_of_others,
    linked_folder,
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
    before = len(os.listdir("/proc/self/fd"))
    assert read_kept(file) is None
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        "[]",
        "5",
        '{"Stub":[1,2,3]}',
        '{"Job":[1]}',
        '{"Job":5}',
        '{"os.system":"true"}',
        '{"ip":"x"}',
        "[",
    ],
)
def test_it_makes_nothing_but_a_job(place: tuple[Path, Path], body: str) -> None:
    file, there = place
    head = json.loads(there.read_bytes().partition(b"\n")[0])
    head["job"] = hashlib.sha256(body.encode()).hexdigest()
    there.write_text(f"{json.dumps(head)}\n{body}")
    assert read_kept(file) is None


def test_a_damaged_one_is_replaced(place: tuple[Path, Path]) -> None:
    file, there = place
    whole = there.read_bytes()
    there.write_bytes(whole[:-20] + b" " + whole[-19:])
    assert read_kept(file) is None
    checked_job = read_checked(file)
    assert keep(file, checked_job)
    assert read_kept(file) == checked_job


def test_other_code_checks_it_again(tmp_path: Path) -> None:
    package = tmp_path / "checkmate"
    shutil.copytree(Path(kept.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    first = checked_by(package)
    os.utime(package / "job" / "checks.py", (0, 0))
    (package / "job" / ".#checks.py").symlink_to("me@host.1:2")
    checked_by.cache_clear()
    assert checked_by(package) == first
    for name in ("job/checks.py", "job/tofino/ports.py", "wire/tag.py", "base/wording.py"):
        with (package / name).open("a") as file:
            file.write("# changed\n")
        checked_by.cache_clear()
        assert checked_by(package) != first
        first = checked_by(package)


def test_another_version_has_a_job_of_its_own(
    place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that share a home may have different versions."""
    file, there = place
    checked_job = read_checked(file)
    monkeypatch.setattr(kept, "checked_by", lambda package: b"another")
    assert read_kept(file) is None
    assert keep(file, checked_job)
    assert read_kept(file) == checked_job
    assert len(list(there.parent.iterdir())) == 2


def test_what_can_be_read_only_once_is_not_kept(cache: Path, tmp_path: Path) -> None:
    file = write_job(tmp_path, job_data())
    checked_job = read_checked(file)
    assert not keep(file, replace(checked_job, files={file: None}))
    assert not cache.exists()
    assert not CheckedJob(checked_job.job, {file: None}).is_current()


def test_a_file_that_is_written_once_it_was_read_is_read_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_job(tmp_path, job_data())
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    read = yaml_lines.read_document

    def and_write(path: Path) -> Document:
        document = read(path)
        path.write_text(path.read_text() + "# changed\n")
        return document

    monkeypatch.setattr(yaml_lines, "read_document", and_write)
    checked_job = read_checked(file)
    assert checked_job.files == {file: before}
    assert keep(file, checked_job)
    assert read_kept(file) is None


def test_an_interrupt_is_not_taken_for_a_cache_that_cannot_be_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_job(tmp_path, job_data())
    checked_job = read_checked(file)
    real_replace = os.replace

    def interrupted(*arguments: Any, **more: Any) -> None:
        real_replace(*arguments, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep(file, checked_job)


def test_a_cache_that_cannot_be_used_is_no_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_job(tmp_path, job_data())
    (tmp_path / "cache").write_text("a file")
    assert not keep(file, read_checked(file))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert not keep(file, read_checked(file))
    assert read_kept(file) is None


def test_the_oldest_go_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "JOBS_MOST", 2)
    files = [write_job(tmp_path, job_data(name)) for name in ("a", "b", "c")]
    for age, file in enumerate(files):
        assert keep(file, read_checked(file))
        for cached in cache.iterdir():
            os.utime(cached, (cached.stat().st_atime, cached.stat().st_mtime - 10))
        assert len(list(cache.iterdir())) == min(age + 1, 2)
    assert [read_kept(file) is not None for file in files] == [False, True, True]


def test_the_newest_stays_whatever_the_clock_says(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "JOBS_MOST", 2)
    for name in ("a", "b", "c", "d"):
        file = write_job(tmp_path, job_data(name))
        assert keep(file, read_checked(file))
        assert read_kept(file) is not None
        for cached in cache.iterdir():
            os.utime(cached, (4e9, 4e9))
    assert len(list(cache.iterdir())) == 2


def test_without_sources_nothing_is_kept(cache: Path, tmp_path: Path) -> None:
    """What checks a job is then unknown."""
    with pytest.raises(OSError, match=r"wording\.py"):
        checked_by(tmp_path)


def test_only_kept_jobs_are_removed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "JOBS_MOST", 1)
    cache.mkdir(mode=0o700, parents=True)
    strange = {cache / "notes.txt", cache / f"{'a' * 31}.job", cache / f"{'b' * 16}.part"}
    remainder = cache / f"{'c' * 16}.part"
    for path in (*strange, remainder):
        path.touch()
        os.utime(path, (0, 0))
    os.utime(cache / f"{'b' * 16}.part")  # it is being written
    for name in ("a", "b"):
        file = write_job(tmp_path, job_data(name))
        assert keep(file, read_checked(file))
    assert strange < set(cache.iterdir())
    assert len(list(cache.iterdir())) == len(strange) + 1


def test_a_folder_that_is_a_link_stays_as_it_is(cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cache.parent.mkdir(parents=True)
    cache.symlink_to(elsewhere)
    file = write_job(tmp_path, job_data())
    assert not keep(file, read_checked(file))
    assert list(elsewhere.iterdir()) == []


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    """An error of the file comes at once."""
    file = tmp_path / "job.yaml"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    assert fingerprint(file) is None
    with pytest.raises(JobError, match="is larger than 2 MiB"):
        read_checked(file)
