"""Plans the files that a job's folder of keys lacks, by what is there. Writes nothing.

The folder has `authority`, which stays with the administrator, and one folder for each role. Certificates
that are missing, end soon or lack a host are issued again. All else is kept, or refused if it is wrong.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from checkmate.job.schema import Job
from checkmate.keys import certificates, disk
from checkmate.keys.authority import Authority, key_pem, new_authority, new_key
from checkmate.keys.errors import KeysError, Malformed
from checkmate.keys.roles import (
    CA_FILE,
    CERT_FILE,
    KEY_FILE,
    SECRETS,
    Role,
    Secret,
    node_hosts,
    role_uri,
)
from checkmate.keys.secret_files import new_secret, parse_secret

AUTHORITY: Final = "authority"
"""The folder of the authority, beside those of roles."""
CA_KEY_FILE: Final = "ca.key"
RENEWED_BEFORE: Final = dt.timedelta(days=60)
"""Certificates that end within this time are issued again."""

_REMOVE: Final = "remove the file, and run this command again to have it made"
_RESTORE: Final = "put the authority's own file back"


@dataclass(frozen=True)
class RoleFiles:
    """The files of a role's folder: what is to be made, in this order, and what is there and kept."""

    role: Role
    folder: Path
    expires: dt.datetime
    """End of the certificate."""
    kept_files: tuple[str, ...]
    new_files: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class JobKeys:
    """The keys of a job: the authority, which is either made or kept, and each role's folder."""

    job: Job
    folder: Path
    expires: dt.datetime
    """End of the authority."""
    kept_files: tuple[str, ...]
    roles: tuple[RoleFiles, ...]
    new_files: Mapping[str, bytes] = field(repr=False)


def plan_keys(job: Job, folder: Path, now: dt.datetime) -> JobKeys:
    """Return the keys of a job as they should be.

    Args:
        job: The job.
        folder: The folder of its keys, which may not exist.
        now: The time of issue, with a time zone.

    Raises:
        KeysError: A file that is there is not as it should be, or the authority is missing.
        OSError: The folder can't be listed.
    """
    authority = read_authority(job, folder) if (folder / AUTHORITY).exists() else None
    if authority is not None and authority.expires - now <= RENEWED_BEFORE:
        raise KeysError(
            f"{folder / AUTHORITY / CA_FILE} ends on {authority.expires:%Y-%m-%d}: once the job has ended, "
            f"remove {folder}, run this command again, and copy all folders again"
        )
    new_files: dict[str, bytes] = {}
    kept_files: tuple[str, ...] = (CA_FILE, CA_KEY_FILE)
    if authority is None:
        _check_empty(folder)
        kept_files = ()
        authority = new_authority(job.job, now)
        new_files = {CA_FILE: authority.pem, CA_KEY_FILE: key_pem(authority.key)}
    files_by_role = {role: _read_role(folder / role, role) for role in Role}
    secrets = _secrets(folder, files_by_role)
    planner = _RolePlanner(job, folder, authority, secrets, now)
    roles = tuple(planner.plan(role, files_by_role[role]) for role in Role)
    return JobKeys(job, folder, authority.expires, kept_files, roles, new_files)


@dataclass(frozen=True)
class _RolePlanner:
    """Plans the folders of a job's roles, by what these have in common."""

    job: Job
    folder: Path
    authority: Authority
    secrets: Mapping[Secret, bytes]
    now: dt.datetime

    def plan(self, role: Role, present: Mapping[str, bytes]) -> RoleFiles:
        folder = self.folder / role
        if present.get(CA_FILE, self.authority.pem).split() != self.authority.pem.split():
            raise KeysError(f"{folder / CA_FILE} is not that of {self.folder / AUTHORITY}; {_REMOVE}")
        key = _ec_key(folder / KEY_FILE, present[KEY_FILE], _REMOVE) if KEY_FILE in present else new_key()
        certificate, pem = self._certificate(role, present, key)
        contents: dict[str, bytes] = {
            KEY_FILE: present.get(KEY_FILE) or key_pem(key),
            **{secret: present.get(secret, self.secrets[secret]) for secret in SECRETS[role]},
            CA_FILE: present.get(CA_FILE, self.authority.pem),
            CERT_FILE: pem,  # last, because a folder without it can't be used
        }
        kept_files = tuple(name for name, content in contents.items() if present.get(name) == content)
        new_files = {name: content for name, content in contents.items() if name not in kept_files}
        return RoleFiles(role, folder, certificate.not_valid_after_utc, kept_files, new_files)

    def _certificate(
        self, role: Role, present: Mapping[str, bytes], key: ec.EllipticCurvePrivateKey
    ) -> tuple[x509.Certificate, bytes]:
        """Return a role's certificate and its PEM: the present one if it will do, else a new one."""
        hosts = node_hosts(self.job) if role is Role.SHADOW else ()
        if {KEY_FILE, CERT_FILE} <= present.keys():
            certificate = self._check_certificate(
                role, self.folder / role / CERT_FILE, present[CERT_FILE], key
            )
            lasts = certificate.not_valid_after_utc - self.now > RENEWED_BEFORE
            if lasts and not certificates.missing_hosts(certificate, hosts):
                return certificate, present[CERT_FILE]
        issued = self.authority.issue(self.job.job, role, hosts, key.public_key(), self.now)
        return issued, issued.public_bytes(Encoding.PEM)

    def _check_certificate(
        self, role: Role, file: Path, pem: bytes, key: ec.EllipticCurvePrivateKey
    ) -> x509.Certificate:
        """Return a role's certificate. Raise `KeysError` if it is not this role's, so that none is lost."""
        (certificate, *rest) = _parse(file, pem, _REMOVE)
        if rest or not certificates.is_signed([certificate], [self.authority.certificate]):
            raise KeysError(f"{file} is not signed by {self.folder / AUTHORITY}; {_REMOVE}")
        if not certificates.belongs(certificate, key):
            raise KeysError(f"{file} is not the certificate of {file.with_name(KEY_FILE)}; {_REMOVE}")
        if certificates.uris(certificate) != [role_uri(self.job.job, role)]:
            raise KeysError(f"{file} is not a certificate of role {role} of job {self.job.job}; {_REMOVE}")
        return certificate


def _check_empty(folder: Path) -> None:
    """Raise `KeysError` if a folder without an authority has anything else."""
    present = [role for role in Role if (folder / role).exists()]
    if present:
        raise KeysError(
            f"{folder} has {present[0]}/, but not {AUTHORITY}/, which signs certificates: "
            f"put {AUTHORITY}/ back; or remove {folder}, run this command again, and copy all folders again"
        )
    if folder.exists() and any(folder.iterdir()):
        raise KeysError(f"{folder} has other files, but no keys; move them away, or choose another --out")


def read_authority(job: Job, folder: Path) -> Authority:
    """Return the authority in a job's folder of keys. Raise `KeysError` if it can't be used."""
    ca_file, key_file = folder / AUTHORITY / CA_FILE, folder / AUTHORITY / CA_KEY_FILE
    pem, key_content = (disk.read_private(file) for file in (ca_file, key_file))
    for file, content in ((ca_file, pem), (key_file, key_content)):
        if content is None:
            raise KeysError(f"{file} is missing; {_RESTORE}")
    (certificate, *rest) = _parse(ca_file, pem or b"", _RESTORE)
    key = _ec_key(key_file, key_content or b"", _RESTORE)
    if rest or not certificates.belongs(certificate, key):
        raise KeysError(f"{ca_file} and {key_file} do not belong together; {_RESTORE}")
    authority = Authority(certificate, key)
    if authority.job != job.job:
        raise KeysError(f"{ca_file} is of job {authority.job!r}, not of job {job.job}; {_RESTORE}")
    return authority


def _read_role(folder: Path, role: Role) -> dict[str, bytes]:
    """Return the files that a role's folder has, of those that it should have."""
    names = (KEY_FILE, *SECRETS[role], CA_FILE, CERT_FILE)
    contents = {name: disk.read_private(folder / name) for name in names}
    return {name: content for name, content in contents.items() if content is not None}


def _secrets(folder: Path, files_by_role: Mapping[Role, Mapping[str, bytes]]) -> dict[Secret, bytes]:
    """Return the content of each secret: what some role has already, or a new one."""
    shared: dict[Secret, bytes] = {}
    for secret in Secret:
        present = {
            folder / role / secret: files_by_role[role][secret]
            for role in Role
            if secret in files_by_role[role]
        }
        values = set()
        for file, content in present.items():
            try:
                values.add(parse_secret(content))
            except Malformed as error:
                raise KeysError(f"{file} {error}; {_REMOVE}") from None
        if len(values) > 1:
            files = " and ".join(map(str, present))
            raise KeysError(
                f"{files} differ; remove the wrong one, and run this command again to copy the other"
            )
        shared[secret] = next(iter(present.values()), None) or new_secret()
    return shared


def _parse(file: Path, pem: bytes, correction: str) -> list[x509.Certificate]:
    try:
        return certificates.load_certificates(pem)
    except Malformed as error:
        raise KeysError(f"{file} {error}; {correction}") from None


def _ec_key(file: Path, pem: bytes, correction: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = certificates.load_private_key(pem)
    except Malformed as error:
        raise KeysError(f"{file} {error}; {correction}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeysError(f"{file} is not an elliptic-curve key; {correction}")
    return key
