"""Reading certificates and private keys: what they contain, and whether they belong together. No I/O."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from checkmate.keys.authority import host_name
from checkmate.keys.errors import Malformed
from checkmate.keys.roles import Role


def load_certificates(pem: bytes) -> list[x509.Certificate]:
    """Return the certificates of a PEM file, at least one. Raise `Malformed` otherwise."""
    try:
        certificates = x509.load_pem_x509_certificates(pem)
        for certificate in certificates:
            _ = certificate.extensions, certificate.public_key(), certificate.subject  # parsed on demand
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        raise Malformed("is not a certificate in PEM format") from None
    return certificates


def load_private_key(pem: bytes) -> PrivateKeyTypes:
    """Return the private key of a PEM file. Raise `Malformed` if there is none, or if it is encrypted."""
    try:
        return load_pem_private_key(pem, None)
    except TypeError:
        raise Malformed("is encrypted; store the private key without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise Malformed("is not a private key in PEM format") from None


def belongs(certificate: x509.Certificate, key: PrivateKeyTypes) -> bool:
    """Return whether a private key is that of a certificate."""
    return _public_bytes(certificate.public_key()) == _public_bytes(key.public_key())


def uris(certificate: x509.Certificate) -> list[str]:
    """Return the URIs among a certificate's subject alternative names."""
    names = _alternatives(certificate)
    return [] if names is None else names.get_values_for_type(x509.UniformResourceIdentifier)


def missing_hosts(certificate: x509.Certificate, hosts: Iterable[str]) -> list[str]:
    """Return the hosts that a certificate does not name. Raise `KeysError` if a host can't be named."""
    names = set(_alternatives(certificate) or ())
    return [host for host in hosts if host_name(host) not in names]


def usage_fault(certificate: x509.Certificate, role: Role) -> str:
    """Return what a certificate's extended key usage lacks for its role, as the end of a sentence, or ""."""
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ""  # no restriction
    required = [(ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth")]
    if role is Role.SHADOW:
        required.append((ExtendedKeyUsageOID.SERVER_AUTH, "serverAuth"))
    lacks = [name for oid, name in required if oid not in usage]
    return f"lacks the extended key usage {' and '.join(lacks)}" if lacks else ""


def time_fault(certificate: x509.Certificate, now: dt.datetime) -> str:
    """Return what is wrong with a certificate's dates, as the end of a sentence, or ""."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        return f"is not valid before {begin:%Y-%m-%d %H:%M} UTC; check the clock of this host"
    return f"has expired on {end:%Y-%m-%d}" if now > end else ""


def is_signed(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> bool:
    """Return whether each certificate is signed by the next one, and the last by one of the authorities."""
    linked = all(_signed_by(certificate, issuer) for certificate, issuer in pairwise(chain))
    return linked and any(_signed_by(chain[-1], authority) for authority in authorities)


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return True


def _alternatives(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _public_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
