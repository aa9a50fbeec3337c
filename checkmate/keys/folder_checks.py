"""Checks of the certificate and the private key in a role's folder, with corrections."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509

from checkmate.keys import certificates
from checkmate.keys.errors import KeysError, Malformed
from checkmate.keys.roles import CA_FILE, CERT_FILE, KEY_FILE, URI_SCHEME, Role, role_uri

_AGAIN = "run `checkmate keys FILE` again, with the job's file, and copy the folder again"


def end_of_sound(
    folder: Path,
    job: str,
    role: Role,
    pems: tuple[bytes, bytes, bytes],
    hosts: Iterable[str],
    now: dt.datetime | None,
) -> dt.datetime:
    """Return the end of a certificate that fits its folder. `pems`: authority, certificate, private key.

    The other arguments are those of `folder.read_keys`. Raise `KeysError` if something does not fit.
    """
    ca, cert, key = pems
    chain = _parse(folder / CERT_FILE, cert)
    leaf, file = chain[0], folder / CERT_FILE
    _check_role(file, leaf, job, role)
    if fault := certificates.time_fault(leaf, now or dt.datetime.now(dt.UTC)):
        raise KeysError(f"{file} {fault}" + (f"; {_AGAIN}" if "expired" in fault else ""))
    if fault := certificates.usage_fault(leaf, role):
        raise KeysError(
            f"{file} {fault}, which role {role} needs; `checkmate docs security` lists what it must contain"
        )
    _check_key(folder, leaf, key)
    if not certificates.is_signed(chain, _parse(folder / CA_FILE, ca)):
        raise KeysError(f"{file} is not signed by {folder / CA_FILE}; copy the folder again, as a whole")
    if missing := certificates.missing_hosts(leaf, hosts):
        raise KeysError(f"{file} does not name the host {' and '.join(missing)}; {_AGAIN}")
    return leaf.not_valid_after_utc


def _parse(file: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return certificates.load_certificates(pem)
    except Malformed as error:
        raise KeysError(f"{file} {error}; copy the folder again, as a whole") from None


def _check_role(file: Path, certificate: x509.Certificate, job: str, role: Role) -> None:
    expected = role_uri(job, role)
    actual = [uri for uri in certificates.uris(certificate) if uri.startswith(URI_SCHEME)]
    if actual != [expected]:
        has = " and ".join(actual) or f"no URI that begins with {URI_SCHEME}"
        raise KeysError(
            f"{file} is not of role {role} of job {job}: it has {has}, not {expected}; "
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
