"""Reading a role's folder: each thing that can be wrong with it has one clear error."""

from __future__ import annotations

import datetime as dt
import os
import shutil
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from checkmate.keys.authority import key_pem
from checkmate.keys.errors import KeysError
from checkmate.keys.folder import RoleKeys, read_keys
from checkmate.keys.roles import SECRETS, Role, Secret
from tests.support.keys import NOW

DAY = dt.timedelta(days=1)
AGAIN = "run `checkmate keys FILE` again, with the job's file, and copy the folder again"


def read(folder: Path, now: dt.datetime = NOW) -> RoleKeys:
    return read_keys(folder, "gpt", Role.SHADOW, now=now)


def check_refused(folder: Path, words: str, now: dt.datetime = NOW) -> None:
    with pytest.raises(KeysError, match=words) as error:
        read(folder, now)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("role", Role)
def test_a_role_reads_what_was_made_for_it(shadow: Path, role: Role) -> None:
    keys = read_keys(shadow.parent / role, "gpt", role)
    assert (keys.job, keys.role, keys.folder) == ("gpt", role, shadow.parent / role)
    assert keys.expires == (NOW + 730 * DAY).replace(microsecond=0)
    assert keys.secrets.keys() == set(SECRETS[role])
    assert {len(secret) for secret in keys.secrets.values()} <= {32}
    assert keys.cert == keys.cert_file.read_bytes()
    assert keys.key == keys.key_file.read_bytes()
    text = repr(keys)
    assert not [s for s in (*keys.secrets.values(), keys.key) if repr(s) in text]


def test_controller_and_shadow_nodes_share_a_secret(shadow: Path) -> None:
    controller = read_keys(shadow.parent / "controller", "gpt", Role.CONTROLLER)
    assert controller.secrets[Secret.HELLO] == read(shadow).secrets[Secret.HELLO]


def test_a_missing_folder_says_how_to_get_it(shadow: Path) -> None:
    shutil.rmtree(shadow)
    words = "run `checkmate keys FILE` with the file of job gpt, and copy the folder keys/gpt/shadow"
    check_refused(shadow, words)


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem", "hello.key"])
def test_each_file_must_be_there_and_private_and_sound(shadow: Path, name: str) -> None:
    file = shadow / name
    content = file.read_bytes()
    for mode in (0o604, 0o640, 0o620):
        file.chmod(mode)
        check_refused(shadow, f"{name} has mode 0{mode:o}, so others .*; correct it with: chmod 600 {file}")
    file.chmod(0o600)
    description = {"key.pem": "a private key in PEM", "hello.key": "64 hexadecimal digits"}.get(
        name, "a certificate in PEM"
    )
    for wrong in (b"", b"\xff\x00", content[:-40], content[20:]):
        file.write_bytes(wrong)
        check_refused(shadow, f"{name} is not {description}")
    file.write_bytes(bytes(1 << 20) + b"\n")
    check_refused(shadow, f"{name} is larger than 1 MiB")
    file.unlink()
    check_refused(shadow, f"{name} is missing; copy the folder again")
    file.mkdir()
    check_refused(shadow, f"can't read .*{name}: it is not a file")
    file.rmdir()
    os.mkfifo(file)
    check_refused(shadow, f"can't read .*{name}: it is not a file")
    file.unlink()
    file.symlink_to(file)
    check_refused(shadow, f"can't read .*{name}: Too many levels")
    file.unlink()
    file.write_bytes(content)
    file.chmod(0o400)
    read(shadow)


def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    """Any other exception would end a controller that serves jobs of several owners."""
    check_refused(tmp_path / ("a" * 300), "can't be a folder of keys")


def test_a_folder_that_others_can_write_is_refused(shadow: Path) -> None:
    shadow.chmod(0o770)
    check_refused(shadow, f"shadow has mode 0770, so others .*; correct it with: chmod 700 {shadow}")
    shadow.chmod(0o755)
    read(shadow)


def test_the_time_is_checked(shadow: Path) -> None:
    check_refused(shadow, f"cert.pem has expired on 20..-..-..; {AGAIN}", NOW + 731 * DAY)
    check_refused(shadow, "cert.pem is not valid before 20.* UTC; check the clock of this host", NOW - DAY)
    read(shadow, NOW + 729 * DAY)


@pytest.mark.parametrize(("job", "role"), [("gpt", "trainer"), ("llama", "shadow")])
def test_keys_of_another_job_or_role_are_refused(shadow: Path, job: str, role: str) -> None:
    foreign = shadow.parents[1] / job / role
    shutil.copy(shadow / "hello.key", foreign)
    check_refused(
        foreign,
        f"cert.pem is not of role shadow of job gpt: it has checkmate:{job}/{role}, "
        "not checkmate:gpt/shadow; copy the folder keys/gpt/shadow here",
    )


def test_files_that_do_not_belong_together_are_refused(shadow: Path) -> None:
    shutil.copy(shadow.parent / "trainer/key.pem", shadow)
    check_refused(shadow, "key.pem is not the private key of .*cert.pem; copy the folder again")


def test_a_certificate_of_another_authority_is_refused(shadow: Path) -> None:
    shutil.copy(shadow.parents[1] / "llama/shadow/ca.pem", shadow)
    check_refused(shadow, "cert.pem is not signed by .*ca.pem; copy the folder again")


def test_an_encrypted_key_is_refused(shadow: Path) -> None:
    key = serialization.load_pem_private_key((shadow / "key.pem").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (shadow / "key.pem").write_bytes(locked)
    check_refused(shadow, "key.pem is encrypted; store the private key without a passphrase")


def test_the_certificate_must_name_the_host_that_serves(shadow: Path) -> None:
    read_keys(shadow, "gpt", Role.SHADOW, hosts=["127.0.0.1"])
    with pytest.raises(KeysError, match=f"cert.pem does not name the host 10.0.0.9; {AGAIN}"):
        read_keys(shadow, "gpt", Role.SHADOW, hosts=["127.0.0.1", "10.0.0.9"])


class OwnAuthority:
    """A user's authority, with an intermediate one that signs."""

    def __init__(self) -> None:
        self.root_key, self.key, self.leaf_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))
        signs = x509.BasicConstraints(ca=True, path_length=None)
        self.root = self._sign("root", self.root_key, "root", self.root_key, signs)
        self.between = self._sign("between", self.key, "root", self.root_key, signs)

    def write(
        self, folder: Path, *extensions: x509.ExtensionType, whole: bool = True, between: bool = True
    ) -> None:
        """Replace a folder's certificate, key and authority."""
        signer = ("between", self.key) if between else ("root", self.root_key)
        leaf = self._sign("leaf", self.leaf_key, *signer, *extensions)
        chain = [leaf, self.between] if between and whole else [leaf]
        pem = serialization.Encoding.PEM
        (folder / "cert.pem").write_bytes(b"".join(certificate.public_bytes(pem) for certificate in chain))
        (folder / "ca.pem").write_bytes(self.root.public_bytes(pem))
        (folder / "key.pem").write_bytes(key_pem(self.leaf_key))

    @staticmethod
    def _sign(
        name: str,
        key: ec.EllipticCurvePrivateKey,
        issuer: str,
        issuer_key: ec.EllipticCurvePrivateKey,
        *extensions: x509.ExtensionType,
    ) -> x509.Certificate:
        def common_name(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        unsigned = (
            x509.CertificateBuilder(
                common_name(issuer), common_name(name), key.public_key(), x509.random_serial_number()
            )
            .not_valid_before(NOW - DAY)
            .not_valid_after(NOW + DAY)
        )
        for extension in extensions:
            unsigned = unsigned.add_extension(extension, critical=False)
        return unsigned.sign(issuer_key, hashes.SHA384())


def test_a_users_own_authority_may_have_an_intermediate_one(shadow: Path) -> None:
    authority = OwnAuthority()
    uris = [x509.UniformResourceIdentifier(uri) for uri in ("spiffe://x/y", "checkmate:gpt/shadow")]
    authority.write(shadow, x509.SubjectAlternativeName(uris))
    assert read(shadow).role is Role.SHADOW
    authority.write(shadow, x509.SubjectAlternativeName(uris), whole=False)
    check_refused(shadow, "cert.pem is not signed by .*ca.pem")
    client = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    authority.write(shadow, x509.SubjectAlternativeName(uris), client)
    check_refused(
        shadow,
        "cert.pem lacks the extended key usage serverAuth, which role shadow needs; `checkmate docs",
    )
    authority.write(shadow)
    check_refused(shadow, "it has no URI that begins with checkmate:, not checkmate:gpt/shadow")
    two = [x509.UniformResourceIdentifier(f"checkmate:gpt/{role}") for role in ("shadow", "trainer")]
    authority.write(shadow, x509.SubjectAlternativeName(two))
    check_refused(shadow, "it has checkmate:gpt/shadow and checkmate:gpt/trainer, not checkmate:gpt/shadow")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_folder_of_another_user_is_one_error(shadow: Path) -> None:
    read(shadow)  # imports all that another user could not
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setuid(65534)
            check_refused(
                shadow, "can't be read by this user, because it, or a folder above it, is another user's"
            )
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
