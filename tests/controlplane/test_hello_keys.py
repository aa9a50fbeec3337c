"""Keys of jobs that come, change and go while the controller serves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkmate.job.following import JobFiles
from checkmate.keys.access import INSECURE
from checkmate.keys.errors import KeysError
from controlplane.hello_keys import HelloKeys
from testbed.jobs import job_data
from tests.support.grants import fabric_of
from tests.support.job_files import write
from tests.support.keys import made

GPT = job_data("gpt")


@pytest.fixture(autouse=True)
def _with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSECURE, raising=False)


def test_keys_are_followed_like_the_job_files(tmp_path: Path) -> None:
    """A job whose keys come after its file is served once they are there."""
    (tmp_path / "jobs").mkdir()
    write(tmp_path / "jobs", GPT, "gpt.yaml")
    fabric = write(tmp_path, fabric_of(GPT), "fabric.yaml")
    keys = HelloKeys(remember=True)
    files = JobFiles([tmp_path / "jobs"], fabric, keys.files)

    found = files.wanted(keys.unusable)
    assert found.jobs == [] and "is not a folder of keys" in found.faults[0].message
    assert not files.changed()

    (job,) = (job for _, job in files.read().sound)
    made(job, tmp_path / "jobs" / "keys")
    assert files.changed()
    assert files.wanted(keys.unusable).jobs == [job]
    assert not files.changed()

    first = keys.of([job])
    shutil.rmtree(tmp_path / "jobs" / "keys")
    made(job, tmp_path / "jobs" / "keys")
    assert files.changed()
    assert files.wanted(keys.unusable).faults == ()
    assert keys.of([job]) != first, "a new secret counts although the job is the same"


def test_keys_that_are_taken_away_stay_as_they_were(tmp_path: Path) -> None:
    """With several owners, that keeps nobody from changing. With one, it is an error."""
    (job,) = (job for _, job in JobFiles([write(tmp_path, GPT)]).read().sound)
    made(job, tmp_path / "keys")
    kept, strict = HelloKeys(remember=True), HelloKeys()
    assert kept.of([job]) == strict.of([job])
    (tmp_path / "keys" / "gpt" / "controller" / "hello.key").unlink()
    assert kept.of([job])["gpt"] and kept.unusable(job) is None
    with pytest.raises(KeysError, match=r"hello\.key is missing"):
        strict.of([job])


def test_without_keys_no_file_is_followed(tmp_path: Path) -> None:
    (job,) = (job for _, job in JobFiles([write(tmp_path, GPT)]).read().sound)
    assert HelloKeys(insecure=True).files(job) == []
    assert HelloKeys().files(job)
