"""`validate` checks the keys and PEM files that belong on this host."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import trustme
import yaml

from checkmate.job.files import read_set
from checkmate.keys.checking import KeyFindings, check_files
from checkmate.keys.making import make_keys
from checkmate.keys.roles import Role
from testbed.jobs import job_data
from tests.support.keys import NOW

DAY = dt.timedelta(days=1)
TLS = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the file of a job whose switch uses TLS, with all keys and files beside it."""
    data = job_data("gpt", nodes=2)
    data["fabric"]["switches"][0]["tls"] = TLS
    file = tmp_path / "gpt.yaml"
    file.write_text(yaml.safe_dump(data))
    loaded = read_set([file]).require()
    make_keys([(loaded_job, tmp_path / "keys") for loaded_job in loaded], NOW)
    client(tmp_path, trustme.CA())
    return file


def client(folder: Path, authority: trustme.CA) -> None:
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    leaf = authority.issue_cert("controller.example.org")
    leaf.cert_chain_pems[0].write_to_path(str(folder / "client.pem"))
    leaf.private_key_pem.write_to_path(str(folder / "client.key"))
    (folder / "client.key").chmod(0o600)


def check(job: Path, now: dt.datetime = NOW) -> KeyFindings:
    return check_files(read_set([job]), now)


def fault_texts(job: Path, now: dt.datetime = NOW) -> list[str]:
    """Return the faults, without folders."""
    findings = check(job, now)
    return [f"{fault.path}: {fault.message}".replace(f"{job.parent}/", "") for fault in findings.faults]


def test_what_belongs_together_has_no_fault(job: Path) -> None:
    assert (fault_texts(job), check(job).notes) == ([], [])


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("rm client.key", "tls.key: client.key cannot be read: No such file or directory"),
        ("rm ca.pem && mkdir ca.pem", "tls.ca: can't read ca.pem: it is not a file"),
        ("rm ca.pem && mkfifo ca.pem", "tls.ca: can't read ca.pem: it is not a file"),
        ("echo x > client.pem", "tls.cert: client.pem is not a certificate in PEM format"),
        ("echo x > client.key", "tls.key: client.key is not a private key in PEM format"),
        ("cp client.pem client.key", "tls.key: client.key is not a private key in PEM format"),
        ("cp keys/gpt/reader/key.pem client.key", "tls.key: client.key is not the private key of client.pem"),
        ("chmod 604 client.key", "tls.key: client.key has mode 0604, so others than its owner have access"),
        (
            "cp keys/gpt/shadow/key.pem keys/gpt/trainer",
            "keys: keys/gpt/trainer/key.pem is not the",
        ),
        ("cp keys/gpt/shadow/*.pem keys/gpt/reader", "keys: keys/gpt/reader/cert.pem is not of role reader"),
        ("chmod 640 keys/gpt/shadow/key.pem", "keys: keys/gpt/shadow/key.pem has mode 0640"),
        ("rm keys/gpt/trainer/ring.key", "keys: keys/gpt/trainer/ring.key is missing; copy the folder again"),
        ("rm keys/gpt/authority/ca.key", "keys: keys/gpt/authority/ca.key is missing"),
        ("rm -r keys/gpt && touch keys/gpt", "keys: keys/gpt is not a folder of keys; move it away"),
    ],
)
def test_what_is_wrong_is_named(job: Path, damage: str, fault: str) -> None:
    subprocess.run(["sh", "-c", damage], cwd=job.parent, check=True)
    (fault_text,) = fault_texts(job)
    assert fault_text.removeprefix("fabric.switches[0].").startswith(fault)


def test_each_folder_that_is_here_is_checked(job: Path) -> None:
    """The next one too, if one is wrong."""
    for role in (Role.TRAINER, Role.SHADOW):
        (job.parent / "keys/gpt" / role / "cert.pem").write_text("x")
    assert [fault.split()[1] for fault in fault_texts(job)] == [
        "keys/gpt/trainer/cert.pem",
        "keys/gpt/shadow/cert.pem",
    ]


def test_what_has_expired_is_a_fault(job: Path) -> None:
    assert sorted({fault.split()[1] for fault in fault_texts(job, NOW + 800 * DAY)}) == [
        f"keys/gpt/{role}/cert.pem" for role in sorted(Role)
    ]
    (first, *_) = fault_texts(job, NOW - 20_000 * DAY)
    assert "is not valid before" in first


def test_a_host_of_another_role_lacks_what_is_the_controllers(job: Path) -> None:
    for name in TLS.values():
        (job.parent / name).unlink()
    assert len(fault_texts(job)) == len(TLS), "this host has the controller's keys, or the administrator's"
    for name in ("authority", Role.CONTROLLER, Role.SHADOW, Role.READER):
        shutil.rmtree(job.parent / "keys/gpt" / name)
    assert fault_texts(job) == [], "a trainer's host"
    (job.parent / "ca.pem").write_text("x")
    assert len(fault_texts(job)) == len(TLS), "a file of the connection is here, so all should be"
    shutil.rmtree(job.parent / "keys")
    (job.parent / "ca.pem").unlink()
    assert len(fault_texts(job)) == len(TLS), "nothing shows what this host is for"


def test_a_client_of_another_authority_is_only_noted(job: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(job.parent / "ca.pem"))
    findings = check(job)
    assert findings.faults == []
    (note,) = findings.notes
    assert "client.pem is not signed by" in note


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_keys_of_another_user_are_noted(job: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "jobs"
        shutil.copytree(job.parent, folder)
        for path in (folder.parent, folder, folder / "keys", folder / "keys/gpt"):
            path.chmod(0o755)
        os.seteuid(65534)
        try:
            findings = check(folder / "gpt.yaml")
        finally:
            os.seteuid(0)
    folders = [f"{folder}/keys/gpt/{name}" for name in ("authority", *Role)]
    assert findings.notes == [f"keys of another user are not checked: {path}" for path in folders]
    assert [path.message for path in findings.faults] == [
        f"can't read {folder}/client.key: Permission denied"
    ]
