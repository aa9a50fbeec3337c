"""Keys of jobs that come, change and go while the controller serves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkmate.job import yaml_lines
from checkmate.job.following import JobFiles
from checkmate.keys.access import INSECURE
from checkmate.keys.errors import KeysError
from controlplane.hello_keys import HelloKeys
from testbed.jobs import job_data
from tests.support.grants import fabric_of
from tests.support.job_files import write
from tests.support.keys import keys_of

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

    job_set = files.jobs_to_serve(keys.unusable)
    assert job_set.jobs == [] and "is not a folder of keys" in job_set.faults[0].message
    assert not files.have_changed()

    (job,) = (job for _, job in files.read().sound)
    keys_of(job, tmp_path / "jobs" / "keys")
    assert files.have_changed()
    assert files.jobs_to_serve(keys.unusable).jobs == [job]
    assert not files.have_changed()

    first = keys.secrets([job])
    keys.note_served([job], first)
    shutil.rmtree(tmp_path / "jobs" / "keys")
    keys_of(job, tmp_path / "jobs" / "keys")
    assert files.have_changed()
    assert files.jobs_to_serve(keys.unusable).faults == ()
    assert keys.secrets([job]) != first, "a new secret counts although the job is the same"


def test_keys_that_are_taken_away_stay_as_they_were(tmp_path: Path) -> None:
    """With several owners, that keeps nobody from changing. With one, it is an error."""
    (job,) = (job for _, job in JobFiles([write(tmp_path, GPT)]).read().sound)
    keys_of(job, tmp_path / "keys")
    remembering, strict = HelloKeys(remember=True), HelloKeys()
    for keys in (remembering, strict):
        keys.note_served([job], keys.secrets([job]))
    (tmp_path / "keys" / "gpt" / "controller" / "hello.key").unlink()
    assert remembering.secrets([job])["gpt"] and remembering.unusable(job) is None
    with pytest.raises(KeysError, match=r"hello\.key is missing"):
        strict.secrets([job])


def test_without_keys_no_file_is_followed(tmp_path: Path) -> None:
    (job,) = (job for _, job in JobFiles([write(tmp_path, GPT)]).read().sound)
    assert HelloKeys(insecure=True).files(job) == []
    assert HelloKeys().files(job)


@pytest.mark.parametrize("change", ["file's mode", "folder's mode"])
def test_a_mode_that_is_corrected_counts(tmp_path: Path, change: str) -> None:
    """Refusals ask for it, and it changes no time of writing."""
    (job,) = (job for _, job in JobFiles([write(tmp_path, GPT)]).read().sound)
    keys_of(job, tmp_path / "keys")
    folder = tmp_path / "keys" / "gpt" / "controller"
    place, right = (folder, 0o700) if change == "folder's mode" else (folder / "key.pem", 0o600)
    place.chmod(0o777)
    keys = HelloKeys()
    files = JobFiles([tmp_path / "job.yaml"], None, keys.files)
    files.read()
    assert "chmod" in (keys.unusable(job) or "")
    assert not files.have_changed()
    place.chmod(right)
    assert files.have_changed()
    assert keys.unusable(job) is None


def test_a_refused_copy_of_a_job_does_not_replace_what_is_remembered(tmp_path: Path) -> None:
    """Its owner could then take the keys of the served one away, and keep everybody from changing."""
    jobs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (job,) = (job for _, job in JobFiles([write(tmp_path / name, GPT)]).read().sound)
        keys_of(job, tmp_path / name / "keys")
        jobs.append(job)
    served, copy = jobs
    keys = HelloKeys(remember=True)
    keys.note_served([served], secrets := keys.secrets([served]))
    assert keys.unusable(copy) is None
    shutil.rmtree(tmp_path / "a" / "keys")
    assert keys.secrets([served]) == secrets
    shutil.rmtree(tmp_path / "b" / "keys")
    assert keys.unusable(copy), "it is not served"


def test_a_name_that_no_file_can_have_is_a_fault_and_keeps_nobody_from_changing(tmp_path: Path) -> None:
    file = write(tmp_path, {**GPT, "keys": "a\0b"}, "gpt.yaml")
    fabric = write(tmp_path, fabric_of(GPT), "fabric.yaml")
    keys = HelloKeys(remember=True)
    files = JobFiles([file], fabric, keys.files)
    assert "must be the path of a file" in files.jobs_to_serve(keys.unusable).faults[0].message
    assert not files.have_changed()


def test_a_fabric_that_a_job_names_is_not_opened_to_find_a_faults_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, {**GPT, "fabric": "secret.yaml"}, "gpt.yaml")
    fabric = write(tmp_path, fabric_of(GPT), "fabric.yaml")
    names: list[str] = []
    read = yaml_lines._read

    def noted(file: Path, regular: bool) -> tuple[str, str | None]:
        names.append(file.name)
        return read(file, regular)

    monkeypatch.setattr(yaml_lines, "_read", noted)
    keys = HelloKeys(remember=True)
    job_set = JobFiles([file], fabric, keys.files).jobs_to_serve(keys.unusable)
    assert [fault.path for fault in job_set.faults] == ["keys"]
    assert set(names) == {"gpt.yaml", "fabric.yaml"}
