"""Making, completing and renewing the folders of keys."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkmate.job.schema import Job
from checkmate.keys import disk
from checkmate.keys.errors import KeysError
from checkmate.keys.folder import read_keys
from checkmate.keys.making import make_keys
from checkmate.keys.plans import JobKeys
from checkmate.keys.roles import Role
from tests.support.keys import FILES, NOW, check_whole, contents, keys_of, served_job

DAY = dt.timedelta(days=1)


@pytest.fixture
def job() -> Job:
    return served_job()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def made_names(keys: JobKeys) -> set[str]:
    """The files that a run has made, by path relative to the job's folder."""
    made_files = {f"{role.role}/{name}" for role in keys.roles for name in role.new_files}
    return made_files | {f"authority/{name}" for name in keys.new_files}


def test_each_role_gets_its_own_secrets_only(job: Job, tmp_path: Path) -> None:
    assert made_names(keys_of(job, tmp_path / "keys")) == FILES
    check_whole(job, tmp_path / "keys")
    files = contents(tmp_path / "keys" / "gpt")
    assert files["controller/hello.key"] == files["shadow/hello.key"] != files["trainer/ring.key"]
    assert len(bytes.fromhex(files["trainer/ring.key"].decode().removesuffix("\n"))) == 32
    assert len({files[f"{role}/key.pem"] for role in Role}) == len(Role)
    assert {files[f"{role}/ca.pem"] for role in Role} == {files["authority/ca.pem"]}


@pytest.mark.parametrize("mask", [0, 0o022, 0o777])
def test_modes_do_not_depend_on_the_umask(job: Job, tmp_path: Path, mask: int) -> None:
    keys = tmp_path / "keys"
    with umask(mask):
        keys_of(job, keys)
        (keys / "gpt/reader/cert.pem").unlink()
        shutil.rmtree(keys / "gpt/trainer")
        keys_of(job, keys)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [keys, *keys.rglob("*")]}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in modes}
    assert len(modes) == len(FILES) + 7


def test_no_moment_has_a_wider_mode(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the calls that only give rights back, a umask of 0 shows how all is created."""
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    with umask(0):
        keys_of(job, tmp_path / "keys")
    for path in [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_second_run_keeps_everything(job: Job, tmp_path: Path) -> None:
    keys_of(job, tmp_path / "keys")
    before = contents(tmp_path)
    again = keys_of(job, tmp_path / "keys", NOW + 669 * DAY)
    assert made_names(again) == set()
    assert {f"{role.role}/{name}" for role in again.roles for name in role.kept_files} | {
        f"authority/{name}" for name in again.kept_files
    } == FILES
    assert contents(tmp_path) == before


def test_a_certificate_is_renewed_60_days_before_its_end_and_keeps_its_key(job: Job, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys_of(job, keys)
    before = contents(keys / "gpt")
    later = NOW + 670 * DAY
    again = keys_of(job, keys, later)
    assert made_names(again) == {f"{role}/cert.pem" for role in Role}
    assert {role.expires for role in again.roles} == {(later + 730 * DAY).replace(microsecond=0)}
    after = contents(keys / "gpt")
    assert {name for name in FILES if before[name] != after[name]} == made_names(again)
    for role in Role:
        read_keys(keys / "gpt" / role, "gpt", role, now=NOW + 1300 * DAY)


def test_a_new_host_renews_the_certificate_of_shadow_nodes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys_of(served_job("gpt", "10.0.0.1", "10.0.0.2"), keys)
    assert made_names(keys_of(served_job("gpt", "10.0.0.2"), keys)) == set()
    grown = served_job("gpt", "10.0.0.2", "node.example.org")
    assert made_names(keys_of(grown, keys)) == {"shadow/cert.pem"}
    read_keys(keys / "gpt/shadow", "gpt", Role.SHADOW, hosts=["10.0.0.2", "node.example.org"])
    check_whole(grown, keys)


@pytest.mark.parametrize("name", sorted(FILES - {"authority/ca.pem", "authority/ca.key"}))
def test_a_missing_file_is_made_again(job: Job, tmp_path: Path, name: str) -> None:
    keys = tmp_path / "keys"
    keys_of(job, keys)
    before = contents(keys / "gpt")
    (keys / "gpt" / name).unlink()
    role = name.partition("/")[0]
    assert made_names(keys_of(job, keys)) == (
        {name, f"{role}/cert.pem"} if name.endswith("/key.pem") else {name}
    )
    check_whole(job, keys)
    after = contents(keys / "gpt")
    if name.endswith(("hello.key", "gradients.key")):
        assert after[name] == before[name]  # from the other role
    if name == "trainer/ring.key":
        assert after[name] != before[name]


def test_a_missing_folder_is_made_again(job: Job, tmp_path: Path) -> None:
    keys_of(job, tmp_path / "keys")
    before = contents(tmp_path / "keys/gpt")
    shutil.rmtree(tmp_path / "keys/gpt/shadow")
    again = {f"shadow/{name}" for name in ("ca.pem", "cert.pem", "key.pem", "hello.key", "gradients.key")}
    assert made_names(keys_of(job, tmp_path / "keys")) == again
    check_whole(job, tmp_path / "keys")
    assert contents(tmp_path / "keys/gpt")["shadow/hello.key"] == before["controller/hello.key"]


def test_several_jobs_have_an_authority_each(tmp_path: Path) -> None:
    jobs = [served_job("a"), served_job("b")]
    make_keys([(job, tmp_path / "keys") for job in jobs], NOW)
    files = contents(tmp_path / "keys")
    assert files["a/authority/ca.pem"] != files["b/authority/ca.pem"]
    assert files["a/trainer/ring.key"] != files["b/trainer/ring.key"]


def test_two_names_of_one_folder_do_not_block_each_other(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "keys")
    make_keys([(served_job("a"), tmp_path / "keys"), (served_job("b"), tmp_path / "link")], NOW)
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {"a", "b"}


def test_a_folder_that_another_run_makes_first_is_used(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = disk._make_folder

    def late(folder: Path) -> None:
        if folder.name == "keys":
            folder.mkdir()
        make(folder)

    monkeypatch.setattr(disk, "_make_folder", late)
    assert keys_of(job, tmp_path / "keys").new_files


def test_runs_at_the_same_time_make_one_set_of_keys(job: Job, tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        runs = list(pool.map(lambda _: keys_of(job, tmp_path / "keys"), range(6)))
    assert sorted(len(made_names(run)) for run in runs) == [0] * 5 + [len(FILES)]
    check_whole(job, tmp_path / "keys")


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def other_authority(folder: Path) -> None:
    keys_of(served_job("other"), folder.parent / "more")
    for name in ("ca.pem", "ca.key"):
        shutil.copy(folder.parent / "more/other/authority" / name, folder / "authority" / name)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no authority": (
        lambda gpt: shutil.rmtree(gpt / "authority"),
        r"gpt has controller/, but not authority/, which signs certificates: put authority/ back; or remove ",
    ),
    "no CA key": (
        lambda gpt: (gpt / "authority/ca.key").unlink(),
        r"ca.key is missing; put the authority's own",
    ),
    "an empty CA": (
        lambda gpt: (gpt / "authority/ca.pem").write_text(""),
        r"ca.pem is not a certificate in PEM",
    ),
    "half an authority": (
        lambda gpt: shutil.copy(gpt / "reader/key.pem", gpt / "authority/ca.key"),
        r"ca.pem and .*ca.key do not belong together",
    ),
    "another job's authority": (other_authority, r"ca.pem is of job 'other', not of job gpt"),
    "another role's certificate": (
        lambda gpt: [shutil.copy(gpt / "reader" / n, gpt / "trainer" / n) for n in ("cert.pem", "key.pem")],
        r"trainer/cert.pem is not a certificate of role trainer of job gpt; remove the file",
    ),
    "another key": (
        lambda gpt: shutil.copy(gpt / "reader/key.pem", gpt / "trainer/key.pem"),
        r"trainer/cert.pem is not the certificate of .*trainer/key.pem; remove the file",
    ),
    "no PEM": (
        lambda gpt: (gpt / "reader/cert.pem").write_text("x"),
        r"reader/cert.pem is not a certificate in PEM",
    ),
    "a foreign CA": (
        lambda gpt: (gpt / "reader/ca.pem").write_text("x"),
        r"reader/ca.pem is not that of .*gpt/authority",
    ),
    "different secrets": (
        lambda gpt: (gpt / "shadow/hello.key").write_text("ab" * 32),
        r"controller/hello.key and .*shadow/hello.key differ; remove the wrong one",
    ),
    "a short secret": (
        lambda gpt: (gpt / "trainer/ring.key").write_text("ab"),
        r"ring.key is not 64 hexadecimal digits, as from: openssl rand -hex 32; remove the file",
    ),
    "a file that others read": (
        lambda gpt: (gpt / "authority/ca.key").chmod(0o640),
        r"ca.key has mode 0640, .*: chmod 600 .*ca.key",
    ),
    "a folder instead of a file": (
        lambda gpt: folder_instead(gpt / "reader/ca.pem"),
        r"can't read .*reader/ca.pem: it is not a file",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_changed(tmp_path: Path, wrong: str) -> None:
    first, gpt = served_job("first"), served_job("gpt")
    keys_of(gpt, tmp_path / "keys")
    damage, words = WRONG[wrong]
    damage(tmp_path / "keys/gpt")
    before = contents(tmp_path / "keys")
    with pytest.raises(KeysError, match=words):
        make_keys([(first, tmp_path / "keys"), (gpt, tmp_path / "keys")], NOW + 700 * DAY)
    assert contents(tmp_path / "keys") == before
    assert not (tmp_path / "keys/first").exists()


def test_an_authority_that_ends_is_reported(job: Job, tmp_path: Path) -> None:
    keys_of(job, tmp_path / "keys")
    with pytest.raises(
        KeysError, match=r"ca.pem ends on 20\d\d-\d\d-\d\d: once the job has ended, remove .*gpt, "
    ):
        keys_of(job, tmp_path / "keys", NOW + 3592 * DAY)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda keys: keys.write_text(""), "can't make keys: .*/keys: File exists"),
        (
            lambda keys: [keys.mkdir(), (keys / "gpt").write_text("")],
            "can't make keys: .*/keys/gpt.*: Not a directory",
        ),
        (
            lambda keys: (keys / "gpt/more").mkdir(parents=True),
            "gpt has other files, but no keys; move them away",
        ),
    ],
)
def test_a_place_that_is_taken_is_refused(
    job: Job, tmp_path: Path, prepare: Callable[[Path], object], words: str
) -> None:
    prepare(tmp_path / "keys")
    with pytest.raises(KeysError, match=words):
        keys_of(job, tmp_path / "keys")
    assert contents(tmp_path).keys() <= {"keys", "keys/gpt"}
