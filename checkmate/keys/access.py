"""A process's access to a job: the keys of its role, or none at all if the user asked for that."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from checkmate.job.schema import Job
from checkmate.keys.errors import KeysError
from checkmate.keys.folder import RoleKeys, read_keys
from checkmate.keys.roles import Role, Secret, role_folder
from checkmate.keys.secret_files import SECRET_BYTES

log = logging.getLogger("checkmate")

INSECURE: Final = "CHECKMATE_INSECURE"
"""Environment variable; `1` has the meaning of `--insecure`."""


@dataclass(frozen=True)
class Access:
    """A role's access to a job. `keys` is `None` without security."""

    job: str
    role: Role
    keys: RoleKeys | None

    def secret(self, secret: Secret) -> bytes:
        """Return a secret, 32 bytes. Without security, everybody can compute it from the job's name."""
        if self.keys is not None:
            return self.keys.secrets[secret]
        return blake2b(f"{self.job}/{secret}".encode(), digest_size=SECRET_BYTES).digest()


def access(job: Job, role: Role, *, insecure: bool = False, hosts: Iterable[str] = ()) -> Access:
    """Return the access of this process to a job.

    Args:
        job: The job, which names the folder of keys.
        role: The role of this process.
        insecure: Whether to use no keys. `CHECKMATE_INSECURE=1` has the same meaning.
        hosts: IP addresses and DNS names at which this process serves, which its certificate must name.

    Raises:
        KeysError: The keys are missing or can't be used.
    """
    if insecure or insecure_everywhere():
        _warn_once()
        return Access(job.job, role, None)
    folder = role_folder(keys_folder(job), job.job, role)
    return Access(job.job, role, read_keys(folder, job.job, role, hosts=hosts))


def insecure_everywhere() -> bool:
    """Return whether this process was told by CHECKMATE_INSECURE to use no keys."""
    return os.environ.get(INSECURE) == "1"


def keys_folder(job: Job) -> Path:
    """Return the folder with the job's folder of keys. Raise `KeysError` if the job is not from a file."""
    if job.keys is None:
        raise KeysError(f"job {job.job} names no folder of keys, because it was not read from a file")
    return job.keys


@cache
def _warn_once() -> None:
    log.warning(
        "without keys: whoever reaches this job's addresses can read and change its checkpoint; "
        "`checkmate keys` makes keys"
    )
