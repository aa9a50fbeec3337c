"""The job that CHECKMATE_JOB names is read once, and again after each change of its files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from checkmate.job.files import read_set
from checkmate.job.schema import JOB_VARIABLE
from checkmate.training.errors import SessionError
from checkmate.training.start.named_job import named_job
from testbed.jobs import job_data


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job file with a fabric file beside it, which CHECKMATE_JOB names, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = job_data()
    (tmp_path / "fabric.yaml").write_text(yaml.safe_dump(data["fabric"]))
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({**data, "fabric": "fabric.yaml"}))
    monkeypatch.setenv(JOB_VARIABLE, str(job))
    return job


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Return a count of reads."""
    counter = Mock(wraps=read_set)
    monkeypatch.setattr("checkmate.job.files.read_set", counter)
    return counter


def edit(file: Path, change: Callable[[str], str]) -> None:
    """Change a file as editors do, without a gap."""
    fresh = file.with_suffix(".fresh")
    fresh.write_text(change(file.read_text()))
    fresh.replace(file)


def test_it_is_read_once(file: Path, reads: Mock) -> None:
    job = named_job()
    assert named_job() is job
    assert reads.call_count == 1


def test_a_change_of_the_job_or_its_fabric_is_seen(file: Path, reads: Mock) -> None:
    assert named_job().job != "other"
    edit(file, lambda text: text.replace("job: ", "job: other #"))
    assert named_job().job == "other"
    fabric = file.with_name("fabric.yaml")
    edit(fabric, lambda text: text + "\n# changed\n")
    named_job()
    assert reads.call_count == 3
    fabric.unlink()
    with pytest.raises(SessionError, match=r"fabric\.yaml cannot be read"):
        named_job()


def test_a_job_that_has_become_faulty_is_not_kept(file: Path) -> None:
    named_job()
    edit(file, lambda text: text.replace("job: ", "jobb: "))
    with pytest.raises(SessionError, match="jobb: unknown key"):
        named_job()


def test_a_change_while_it_is_read_is_seen_next_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = file.with_name("fabric.yaml")

    def late(text: str) -> str:
        return text.replace("9559", "9558")

    def read(*arguments: object) -> object:
        contents = read_set(*arguments)  # type: ignore[arg-type]
        edit(fabric, late)
        return contents

    with monkeypatch.context() as patch:
        patch.setattr("checkmate.job.files.read_set", read)
        named_job()
    assert named_job().fabric.switches[0].address.endswith(":9558")


def test_paths_in_a_job_do_not_depend_on_how_it_was_named_before(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(JOB_VARIABLE, "job.yaml")
    named_job()
    monkeypatch.chdir("/")
    monkeypatch.setenv(JOB_VARIABLE, str(file))
    assert named_job().keys == tmp_path / "keys"


def test_a_relative_name_is_of_the_present_folder(
    file: Path, reads: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(JOB_VARIABLE, "job.yaml")
    monkeypatch.chdir(tmp_path)
    named_job()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(SessionError, match="cannot be read"):
        named_job()


def test_a_folder_is_not_a_job(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`run` takes folders of job files; a trainer has one job."""
    monkeypatch.setenv(JOB_VARIABLE, str(tmp_path))
    with pytest.raises(SessionError, match="is a folder; give the path of a file in it"):
        named_job()


def test_a_pipe_is_read_each_time(
    file: Path, reads: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    monkeypatch.setenv(JOB_VARIABLE, str(pipe))
    for _ in range(2):
        writer = threading.Thread(target=pipe.write_text, args=[file.read_text()])
        writer.start()
        named_job()
        writer.join(10)
    assert reads.call_count == 2


def test_the_next_start_does_not_read_it_and_needs_nothing_that_checks_jobs(file: Path, reads: Mock) -> None:
    first = named_job()
    script = (
        "import sys; from checkmate.training import protect, restore;"
        "from checkmate.training.start.named_job import named_job;"
        "print(named_job().job, *sorted({'pydantic', 'yaml'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout.split() == [first.job]


@pytest.mark.parametrize(("rank", "writes"), [("0", True), ("1", False)])
def test_one_process_of_a_host_keeps_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, writes: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    named_job()
    assert (tmp_path / "cache").exists() == writes
