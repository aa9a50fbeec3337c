"""A role's folder of keys, as a process of that role reads it when it starts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from checkmate.keys import certificates, disk
from checkmate.keys.errors import KeysError, Malformed
from checkmate.keys.roles import CA_FILE, CERT_FILE, KEY_FILE, SECRETS, URI_SCHEME, Role, Secret, role_uri
from checkmate.keys.secret_files import parse_secret

_AGAIN = "run `checkmate keys FILE` again, with the job's file, and copy the folder again"


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
        there = folder.is_dir()
    except PermissionError:
        raise KeysError(
            f"{folder} can't be read by this user, because it, or a folder above it, is another user's; copy "
            "it to a folder of this user, and name that as `keys` in the job file"
        ) from None
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL character
        raise KeysError(f"{str(folder)[:200]!r} can't be a folder of keys: {error}"[:400]) from None
    if not there:
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
    chain = _parsed(folder / CERT_FILE, cert)
    leaf, file = chain[0], folder / CERT_FILE
    _check_role(file, leaf, job, role)
    if fault := certificates.time_fault(leaf, now or dt.datetime.now(dt.UTC)):
        raise KeysError(f"{file} {fault}" + (f"; {_AGAIN}" if "expired" in fault else ""))
    if fault := certificates.usage_fault(leaf, role):
        raise KeysError(
            f"{file} {fault}, which role {role} needs; `checkmate docs security` lists what it must contain"
        )
    _check_key(folder, leaf, key)
    if not certificates.is_signed(chain, _parsed(folder / CA_FILE, ca)):
        raise KeysError(f"{file} is not signed by {folder / CA_FILE}; copy the folder again, as a whole")
    if missing := certificates.missing_hosts(leaf, hosts):
        raise KeysError(f"{file} does not name the host {' and '.join(missing)}; {_AGAIN}")
    return RoleKeys(folder, job, role, leaf.not_valid_after_utc, ca, cert, key, secrets)


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


def _parsed(file: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return certificates.load_certificates(pem)
    except Malformed as error:
        raise KeysError(f"{file} {error}; copy the folder again, as a whole") from None


def _check_role(file: Path, certificate: x509.Certificate, job: str, role: Role) -> None:
    wanted = role_uri(job, role)
    found = [uri for uri in certificates.uris(certificate) if uri.startswith(URI_SCHEME)]
    if found != [wanted]:
        has = " and ".join(found) or f"no URI that begins with {URI_SCHEME}"
        raise KeysError(
            f"{file} is not of role {role} of job {job}: it has {has}, not {wanted}; "
            f"copy the folder keys/{job}/{role} here"
        )


def _check_key(folder: Path, certificate: x509.Certificate, pem: bytes) -> None:
    try:
        key = certificates.load_private_key(pem)
    except Malformed as error:
        raise KeysError(f"{folder / KEY_FILE} {error}") from None
    if not certificates.belongs(certificate, key):
        raise KeysError(
            f"{folder / KEY_FILE} is not the private key of {folder / CERT_FILE}; "
            "copy the folder again, as a whole"
        )
