"""A role's folder of keys, as a process of that role reads it when it starts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkmate.keys import disk, tls_trial
from checkmate.keys.errors import KeysError, Malformed
from checkmate.keys.roles import CA_FILE, CERT_FILE, KEY_FILE, SECRETS, Role, Secret, role_uri
from checkmate.keys.secret_files import parse_secret


@dataclass(frozen=True)
class RoleKeys:
    """The keys of one role of one job. `ca`, `cert`, `key`: PEM; `secrets`: those that the role needs."""

    folder: Path
    job: str
    role: Role
    expires: dt.datetime
    """End of the certificate."""
    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    secrets: Mapping[Secret, bytes] = field(repr=False)

    @property
    def cert_file(self) -> Path:
        """The file of `cert`."""
        return self.folder / CERT_FILE

    @property
    def key_file(self) -> Path:
        """The file of `key`."""
        return self.folder / KEY_FILE


def read_keys(
    folder: Path, job: str, role: Role, *, hosts: Iterable[str] = (), now: dt.datetime | None = None
) -> RoleKeys:
    """Read and check a role's folder.

    Args:
        folder: The folder, such as `keys/gpt/trainer`.
        job: The name of the job that the keys must be of.
        role: The role that they must be of.
        hosts: IP addresses and DNS names at which this process serves, which the certificate must name.
        now: The time, with a time zone; by default the present time.

    Raises:
        KeysError: The folder or a file of it is missing, is accessible to others than its owner, or can't be
            used.
    """
    try:
        exists = folder.is_dir()
    except PermissionError:
        raise KeysError(
            f"{folder} can't be read by this user, because it, or a folder above it, is another user's; copy "
            "it to a folder of this user, and name that as `keys` in the job file"
        ) from None
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL character
        raise KeysError(f"{str(folder)[:200]!r} can't be a folder of keys: {error}"[:400]) from None
    if not exists:
        raise KeysError(
            f"{folder} is not a folder of keys of role {role}: run `checkmate keys FILE` with the "
            f"file of job {job}, and copy the folder keys/{job}/{role} that it makes to {folder} here"
        )
    try:
        disk.check_folder(folder)
    except OSError as error:  # it was removed meanwhile
        raise KeysError(f"{folder} can't be read: {error.strerror}") from None
    ca, cert, key = (_read(folder, name) for name in (CA_FILE, CERT_FILE, KEY_FILE))
    secrets = {secret: _secret(folder, secret) for secret in SECRETS[role]}
    expires, host_names = None, tuple(hosts)
    if now is None and not host_names and role is not Role.SHADOW:  # which must be a server, too
        expires = tls_trial.end_of_client(folder, (ca, cert, key), role_uri(job, role))
    if expires is None:
        from checkmate.keys import folder_checks  # noqa: PLC0415 - cryptography takes as long as all the rest

        expires = folder_checks.end_of_sound(folder, job, role, (ca, cert, key), host_names, now)
    return RoleKeys(folder, job, role, expires, ca, cert, key, secrets)


def _read(folder: Path, name: str) -> bytes:
    content = disk.read_private(folder / name)
    if content is None:
        raise KeysError(f"{folder / name} is missing; copy the folder again, as a whole")
    return content


def _secret(folder: Path, secret: Secret) -> bytes:
    try:
        return parse_secret(_read(folder, secret))
    except Malformed as error:
        raise KeysError(f"{folder / secret} {error}; copy the folder again, as a whole") from None
