"""`checkmate keys`: make and renew the keys of jobs, and print where to copy them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from checkmate.cli.common import AsJson, JobArguments, out, print_json, read_job_set, show_errors
from checkmate.job.schema import Job
from checkmate.keys.access import keys_folder
from checkmate.keys.making import make_keys
from checkmate.keys.plans import AUTHORITY, JobKeys, RoleFiles
from checkmate.keys.roles import Role, hosts_of
from checkmate.output.tables import FittedTable
from topologies.signals import unwinding

_STAYS: Final = "nowhere: stays with the administrator"
_PLACES: Final = {
    Role.CONTROLLER: "the controller's host (checkmate run)",
    Role.TRAINER: "hosts of ranks",
    Role.SHADOW: "hosts of shadow nodes",
    Role.READER: "hosts where checkpoints are read (checkmate consolidate)",
}
_MAX_HOSTS: Final = 8


@show_errors
def keys(
    jobs: JobArguments,
    to: Annotated[
        Path | None, typer.Option("--out", help="Folder of keys.", show_default="the job's, keys/")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the keys of jobs, or complete and renew them, and print where to copy them.

    Makes a certificate authority for each job, and a folder of keys for each role. Run again, it keeps what
    is there, and issues certificates that are missing, end within 60 days, or lack a host of the job.
    Nothing is made if a job file has a fault.

    Example: checkmate keys jobs/gpt.yaml
    """
    folders = [(job, keys_folder(job) if to is None else to) for job in read_job_set(jobs).require()]
    with unwinding():
        keys_of_jobs = make_keys(folders, dt.datetime.now(dt.UTC))
    if as_json:
        print_json({"keys": [_data(job_keys) for job_keys in keys_of_jobs]})
        return
    for job_keys in keys_of_jobs:
        _show(job_keys)


def _data(job_keys: JobKeys) -> dict[str, object]:
    """Return the keys of a job, without their content."""
    return {
        "job": job_keys.job.job,
        "folder": str(job_keys.folder),
        "authority": {
            "folder": str(job_keys.folder / AUTHORITY),
            "made": list(job_keys.new_files),
            "kept": list(job_keys.kept_files),
            "valid_until": job_keys.expires.isoformat(),
        },
        "roles": [
            {
                "role": role.role,
                "folder": str(role.folder),
                "hosts": hosts_of(job_keys.job, role.role),
                "made": list(role.new_files),
                "kept": list(role.kept_files),
                "valid_until": role.expires.isoformat(),
            }
            for role in job_keys.roles
        ],
    }


def _show(job_keys: JobKeys) -> None:
    """Print a table of a job's folders of keys."""
    out.print(Text(f"keys of job {job_keys.job.job}: {job_keys.folder}/"), soft_wrap=True)
    folds = ("copy to", "made", "kept")
    table = FittedTable("", "folder", *folds, "valid until", folds=folds)
    table.add_row(
        f"{AUTHORITY}/",
        _STAYS,
        *_files(job_keys.new_files, job_keys.kept_files),
        f"{job_keys.expires:%Y-%m-%d}",
    )
    for role in job_keys.roles:
        files = _files(role.new_files, role.kept_files)
        table.add_row(f"{role.role}/", _place(job_keys.job, role), *files, f"{role.expires:%Y-%m-%d}")
    out.print(table)


def _place(job: Job, role: RoleFiles) -> str:
    if role.role is Role.CONTROLLER and job.copies == "host":
        return "nowhere: with copies by hosts, there is none"
    hosts = hosts_of(job, role.role)
    first_hosts, more = hosts[:_MAX_HOSTS], len(hosts) - _MAX_HOSTS
    names = ", ".join(first_hosts) + (f" and {more} more (--json)" if more > 0 else "")
    return f"{_PLACES[role.role]}: {names}" if hosts else _PLACES[role.role]


def _files(new: Iterable[str], unchanged: Iterable[str]) -> tuple[str, str]:
    return ", ".join(new) or "-", ", ".join(unchanged) or "-"
