"""Keys of generated jobs."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.keys.folder import RoleKeys, read_keys
from checkmate.keys.making import make_keys
from checkmate.keys.plans import JobKeys
from checkmate.keys.roles import Role, role_folder
from testbed.jobs import job_data

NOW = dt.datetime.now(dt.UTC)
FILES = {
    "authority/ca.pem",
    "authority/ca.key",
    *(f"{role}/{name}" for role in Role for name in ("ca.pem", "cert.pem", "key.pem")),
    "controller/hello.key",
    "shadow/hello.key",
    "shadow/gradients.key",
    "trainer/ring.key",
    "trainer/gradients.key",
}
"""All files of a job's keys, by path relative to its folder."""


def served_job(name: str = "gpt", *hosts: str) -> Job:
    """Return a job whose shadow nodes are at `hosts`, by default one at 127.0.0.1."""
    hosts = hosts or ("127.0.0.1",)
    data = job_data(name, nodes=len(hosts))
    for node, host in zip(data["shadow_nodes"], hosts, strict=True):
        node["mgmt"] = f"[{host}]:7000" if ":" in host else f"{host}:7000"
    return of_data(Job, data)


def keys_of(job: Job, keys: Path, now: dt.datetime = NOW) -> JobKeys:
    """Make a job's keys."""
    (job_keys,) = make_keys([(job, keys)], now)
    return job_keys


def role_keys(job: Job, keys: Path, role: Role, now: dt.datetime = NOW) -> RoleKeys:
    """Make a job's keys if necessary, and return those of a role."""
    if not (keys / job.job).exists():
        keys_of(job, keys, now)
    return read_keys(role_folder(keys, job.job, role), job.job, role, now=now)


def secured(job: Job, folder: Path) -> Job:
    """Make a job's keys in a folder, and return the job with that folder."""
    keys_of(job, folder)
    return replace(job, keys=folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files in a folder and its folders, by relative path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def check_whole(job: Job, keys: Path) -> None:
    """Check that every role can read its keys, and that nothing else is there."""
    assert {path.name for path in keys.iterdir()} == {job.job}
    assert contents(keys / job.job).keys() == FILES
    for role in Role:
        read_keys(keys / job.job / role, job.job, role, now=NOW)


def without_warning(text: str) -> str:
    """Return what a command printed, without the warning that it uses no keys."""
    return "".join(line for line in text.splitlines(keepends=True) if "without keys: " not in line)
