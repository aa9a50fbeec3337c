"""A job's certificate authority: makes itself, and signs a certificate for each role. No I/O."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from checkmate.keys.errors import KeysError
from checkmate.keys.roles import Role, role_uri

AUTHORITY_LIFE: Final = dt.timedelta(days=3652)
"""Ten years."""
ROLE_LIFE: Final = dt.timedelta(days=730)
"""Two years."""
BACKDATED: Final = dt.timedelta(hours=1)
"""Certificates are valid from this time before they are made, because clocks differ."""

_PRODUCT: Final = "Checkmate"


@dataclass(frozen=True)
class Authority:
    """A certificate authority of one job."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def pem(self) -> bytes:
        """The certificate that all roles trust."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def job(self) -> str:
        """The name of its job, or an empty string if the certificate has none."""
        names = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(names[0].value) if names else ""

    @property
    def expires(self) -> dt.datetime:
        """The end of the authority's own certificate, and with it of all others."""
        return self.certificate.not_valid_after_utc

    def issue(
        self, job: str, role: Role, hosts: Iterable[str], public: ec.EllipticCurvePublicKey, now: dt.datetime
    ) -> x509.Certificate:
        """Return a new certificate for a role.

        Args:
            job: The job's name.
            role: The role of whoever has the private key.
            hosts: IP addresses and DNS names at which it serves; clients check them.
            public: The role's public key.
            now: The time of issue, with a time zone.

        Raises:
            KeysError: A host can't be named in a certificate.
        """
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(role_uri(job, role))]
        names += [host_name(host) for host in hosts]
        client, server = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
        usages = [server, client] if role is Role.SHADOW else [client]
        unsigned = (
            _builder(_name(role, job), public, now, min(now + ROLE_LIFE, self.expires))
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
        )
        return unsigned.sign(self.key, hashes.SHA256())


def new_authority(job: str, now: dt.datetime) -> Authority:
    """Return a new authority for a job. `now`: the time of issue, with a time zone."""
    key = new_key()
    name = _name("authority", job)
    unsigned = (
        _builder(name, key.public_key(), now, now + AUTHORITY_LIFE)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return Authority(unsigned.sign(key, hashes.SHA256()), key)


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key, EC P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM, PKCS #8, not encrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def host_name(host: str) -> x509.GeneralName:
    """Return a host as a certificate names it. Raise `KeysError` if it can't."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        try:
            return x509.DNSName(host)
        except ValueError:
            raise KeysError(
                f"the host {host!r} of a shadow node can't be named in a certificate; "
                "use its IP address, or a DNS name in ASCII"
            ) from None


def _name(unit: str, job: str) -> x509.Name:
    """Return a subject's name. Each part has at most 64 characters, a job's name at most 63."""
    parts = (
        (NameOID.ORGANIZATION_NAME, _PRODUCT),
        (NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
        (NameOID.COMMON_NAME, job),
    )
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in parts])


def _builder(
    subject: x509.Name, public: ec.EllipticCurvePublicKey, now: dt.datetime, end: dt.datetime
) -> x509.CertificateBuilder:
    """Return a builder with the fields that all certificates have."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
