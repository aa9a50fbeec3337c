"""Access to a job: with its role's keys, or without any if that was asked for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from checkmate.job.files import read_job
from checkmate.keys.access import INSECURE, Access, access
from checkmate.keys.errors import KeysError
from checkmate.keys.roles import Role, Secret
from testbed.jobs import job, job_data
from tests.support.keys import keys_of


@pytest.fixture(autouse=True)
def secure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSECURE, raising=False)


def test_the_keys_are_beside_the_job_file_or_where_it_names(tmp_path: Path) -> None:
    for folder_name, folder in ((None, "keys"), ("elsewhere", "elsewhere"), ("/etc/keys", "/etc/keys")):
        file = tmp_path / "gpt.yaml"
        file.write_text(yaml.safe_dump(job_data("gpt") | ({"keys": folder_name} if folder_name else {})))
        assert read_job(file).keys == tmp_path / folder


def test_each_role_has_its_own_keys_and_secrets(tmp_path: Path) -> None:
    gpt_job = replace(job("gpt"), keys=tmp_path)
    keys_of(gpt_job, tmp_path)
    controller, shadow, trainer = (
        access(gpt_job, Role(name)) for name in ("controller", "shadow", "trainer")
    )
    assert controller.secret(Secret.HELLO) == shadow.secret(Secret.HELLO)
    assert len(trainer.secret(Secret.RING)) == len(shadow.secret(Secret.HELLO)) == 32
    assert trainer.secret(Secret.RING) not in (
        shadow.secret(Secret.HELLO),
        Access("gpt", Role.TRAINER, None).secret(Secret.RING),
    )
    with pytest.raises(KeyError):
        trainer.secret(Secret.HELLO)


def test_without_keys_nothing_starts(tmp_path: Path) -> None:
    gpt_job = replace(job("gpt"), keys=tmp_path)
    with pytest.raises(KeysError, match=r"checkmate keys FILE.*keys/gpt/trainer"):
        access(gpt_job, Role.TRAINER)
    with pytest.raises(KeysError, match="not read from a file"):
        access(job("gpt"), Role.TRAINER)


def test_insecurity_must_be_asked_for_and_has_public_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt_job = replace(job("gpt"), keys=tmp_path)
    insecure_keys = access(gpt_job, Role.SHADOW, insecure=True)
    monkeypatch.setitem(os.environ, INSECURE, "1")
    assert access(gpt_job, Role.CONTROLLER).secret(Secret.HELLO) == insecure_keys.secret(Secret.HELLO)
    assert access(job("llama"), Role.CONTROLLER).secret(Secret.HELLO) != insecure_keys.secret(Secret.HELLO)
    monkeypatch.setitem(os.environ, INSECURE, "0")
    with pytest.raises(KeysError):
        access(gpt_job, Role.CONTROLLER)
