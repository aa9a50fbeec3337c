"""`checkmate validate --init`: make the keys of jobs, and print where to copy them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

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
_HOSTS_SHOWN: Final = 8


def make(jobs: Sequence[Job], keys: Path | None) -> list[JobKeys]:
    """Make the keys of jobs in `keys`, by default where each job has them. Raise `KeysError` if it fails."""
    with unwinding():
        wanted = [(job, keys_folder(job) if keys is None else keys) for job in jobs]
        return make_keys(wanted, dt.datetime.now(dt.UTC))


def data(made: JobKeys) -> dict[str, object]:
    """Return the keys of a job, without their content, for `--json`."""
    return {
        "job": made.job.job,
        "folder": str(made.folder),
        "authority": {
            "folder": str(made.folder / AUTHORITY),
            "made": list(made.made),
            "kept": list(made.kept),
            "valid_until": made.expires.isoformat(),
        },
        "roles": [
            {
                "role": role.role,
                "folder": str(role.folder),
                "hosts": hosts_of(made.job, role.role),
                "made": list(role.made),
                "kept": list(role.kept),
                "valid_until": role.expires.isoformat(),
            }
            for role in made.roles
        ],
    }


def show(made: JobKeys, out: Console) -> None:
    """Print a table of a job's folders of keys."""
    out.print(Text(f"keys of job {made.job.job}: {made.folder}/"), soft_wrap=True)
    folds = ("copy to", "made", "kept")
    table = FittedTable("", "folder", *folds, "valid until", folds=folds)
    table.add_row(f"{AUTHORITY}/", _STAYS, *_files(made.made, made.kept), f"{made.expires:%Y-%m-%d}")
    for role in made.roles:
        files = _files(role.made, role.kept)
        table.add_row(f"{role.role}/", _place(made.job, role), *files, f"{role.expires:%Y-%m-%d}")
    out.print(table)


def _place(job: Job, role: RoleFiles) -> str:
    hosts = hosts_of(job, role.role)
    shown, more = hosts[:_HOSTS_SHOWN], len(hosts) - _HOSTS_SHOWN
    listed = ", ".join(shown) + (f" and {more} more (--json)" if more > 0 else "")
    return f"{_PLACES[role.role]}: {listed}" if hosts else _PLACES[role.role]


def _files(made: Iterable[str], kept: Iterable[str]) -> tuple[str, str]:
    return ", ".join(made) or "-", ", ".join(kept) or "-"
