"""What the certificates of a job contain."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from checkmate.keys.authority import Authority, new_authority, new_key
from checkmate.keys.errors import KeysError
from checkmate.keys.roles import Role, node_hosts
from tests.support.keys import NOW, served_job

SECOND = dt.timedelta(seconds=1)
HOSTS = ("10.0.0.5", "fd00::5", "node5.example.org")


def issued(
    authority: Authority, role: Role, hosts: tuple[str, ...] = (), now: dt.datetime = NOW
) -> x509.Certificate:
    return authority.issue("gpt", role, hosts, new_key().public_key(), now)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority("gpt", NOW)


def test_the_authority_signs_for_its_job_only_and_directly(authority: Authority) -> None:
    certificate = authority.certificate
    assert certificate.subject.rfc4514_string() == "CN=gpt,OU=authority,O=Checkmate"
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert basic.value == x509.BasicConstraints(ca=True, path_length=0)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert (usage.value.key_cert_sign, usage.value.digital_signature) == (True, False)
    assert isinstance(authority.key.curve, ec.SECP256R1)
    assert abs(authority.expires - NOW - dt.timedelta(days=3652)) < SECOND
    assert (authority.job, "PRIVATE" in repr(authority)) == ("gpt", False)


@pytest.mark.parametrize("role", Role)
def test_a_roles_certificate_names_job_and_role_and_only_shadow_nodes_serve(
    authority: Authority, role: Role
) -> None:
    hosts = HOSTS if role is Role.SHADOW else ()
    certificate = issued(authority, role, hosts)
    certificate.verify_directly_issued_by(authority.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"checkmate:gpt/{role}"]
    host_names = [
        *map(str, names.get_values_for_type(x509.IPAddress)),
        *names.get_values_for_type(x509.DNSName),
    ]
    assert host_names == list(hosts)
    usages = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert (ExtendedKeyUsageOID.SERVER_AUTH in usages) == (role is Role.SHADOW)
    assert ExtendedKeyUsageOID.CLIENT_AUTH in usages
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca) == (True, False)
    assert abs(certificate.not_valid_after_utc - NOW - dt.timedelta(days=730)) < SECOND
    assert certificate.not_valid_before_utc < NOW


def test_no_certificate_outlives_its_authority(authority: Authority) -> None:
    late = NOW + dt.timedelta(days=3600)
    assert issued(authority, Role.TRAINER, now=late).not_valid_after_utc == authority.expires


def test_the_hosts_of_a_job_are_those_of_both_addresses_of_its_nodes() -> None:
    plain = served_job("gpt", *HOSTS)
    nodes = [replace(plain.shadow_nodes[0], records="10.9.9.9:1"), *plain.shadow_nodes[1:]]
    job = replace(plain, shadow_nodes=tuple(nodes))
    assert node_hosts(job) == ("10.0.0.5", "10.9.9.9", "fd00::5", "node5.example.org")


def test_a_host_that_no_certificate_can_name_is_refused(authority: Authority) -> None:
    with pytest.raises(KeysError, match=r"the host 'knöten' of a shadow node can't be named.*in ASCII"):
        issued(authority, Role.SHADOW, ("knöten",))


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True), st.ip_addresses())
def test_any_job_and_address_can_be_named(job: str, host: object) -> None:
    authority = new_authority(job, NOW)
    certificate = authority.issue(job, Role.SHADOW, [str(host)], new_key().public_key(), NOW)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert authority.job == job
    assert names.value.get_values_for_type(x509.UniformResourceIdentifier) == [f"checkmate:{job}/shadow"]
    assert names.value.get_values_for_type(x509.IPAddress) == [ip_address(str(host))]
