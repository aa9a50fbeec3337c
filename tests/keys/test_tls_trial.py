"""The quick way to read a client's folder: what it accepts, the checks that explain faults accept, too."""

from __future__ import annotations

import datetime as dt
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from checkmate.keys import tls_trial
from checkmate.keys.errors import KeysError
from checkmate.keys.folder import read_keys
from checkmate.keys.folder_checks import end_of_sound
from checkmate.keys.roles import Role
from tests.keys.test_folder import OwnAuthority
from tests.support.keys import NOW, keys_of, served_job

URI = "checkmate:gpt/trainer"


@pytest.fixture
def trainer(shadow: Path) -> Path:
    """Return the folder of the trainer role, beside those of other roles and of another job."""
    return shadow.parent / "trainer"


def pems(folder: Path) -> tuple[bytes, bytes, bytes]:
    ca, cert, key = ((folder / f"{name}.pem").read_bytes() for name in ("ca", "cert", "key"))
    return ca, cert, key


def trial_time(folder: Path) -> dt.datetime | None:
    return tls_trial.end_of_client(folder, pems(folder), URI)


def check_now(folder: Path) -> dt.datetime:
    return end_of_sound(folder, "gpt", Role.TRAINER, pems(folder), (), None)


def test_it_ends_when_the_checks_say(trainer: Path) -> None:
    assert trial_time(trainer) == check_now(trainer) == read_keys(trainer, "gpt", Role.TRAINER).expires


def test_a_certificate_may_end_after_it_was_tried(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = trial_time(trainer)
    assert end is not None
    after = end.timestamp() + 1

    class Later(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Later:
            return cls.fromtimestamp(after, tz)

    monkeypatch.setattr("checkmate.keys.tls_trial.dt.datetime", Later)
    assert trial_time(trainer) is None


def test_a_sound_folder_needs_no_cryptography(trainer: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from checkmate.keys.folder import read_keys;"
        "from checkmate.keys.roles import Role;"
        f"read_keys(Path({str(trainer)!r}), 'gpt', Role.TRAINER); print('cryptography' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout == "False\n"


def with_own(*extensions: x509.ExtensionType, **how: bool) -> Callable[[Path], object]:
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(URI)])
    return lambda folder: OwnAuthority().write(folder, names, *extensions, **how)


def encrypted(folder: Path) -> None:
    key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))


def encrypted_with_nothing(folder: Path) -> None:
    """Encrypt the private key with an empty passphrase, which cryptography refuses to do."""
    command = ["openssl", "pkcs8", "-topk8", "-v2", "aes256", "-in", "key.pem", "-out", "locked.pem"]
    subprocess.run([*command, "-passout", "pass:"], cwd=folder, check=True)
    (folder / "locked.pem").replace(folder / "key.pem")


def with_another(folder: Path) -> None:
    more = (folder.parents[1] / "llama/trainer/cert.pem").read_bytes()
    (folder / "cert.pem").write_bytes((folder / "cert.pem").read_bytes() + more)


def trusted(folder: Path) -> None:
    """Make the certificate one of OpenSSL's own form, which may restrict what it is trusted for."""
    command = ["openssl", "x509", "-in", "cert.pem", "-trustout", "-out", "trusted.pem"]
    subprocess.run(command, cwd=folder, check=True)
    (folder / "trusted.pem").replace(folder / "cert.pem")


def made_at(days: int) -> Callable[[Path], object]:
    def remake(folder: Path) -> None:
        shutil.rmtree(folder.parents[1])
        keys_of(served_job("gpt"), folder.parents[1], NOW + dt.timedelta(days=days))

    return remake


FAULTS: dict[str, Callable[[Path], object]] = {
    "another role": lambda folder: [
        shutil.copy(folder.parent / "reader" / f"{name}.pem", folder) for name in ("cert", "key")
    ],
    "another job": lambda folder: [
        shutil.copy(folder.parents[1] / "llama/trainer" / f"{name}.pem", folder)
        for name in ("ca", "cert", "key")
    ],
    "another key": lambda folder: shutil.copy(folder.parent / "reader/key.pem", folder),
    "another authority": lambda folder: shutil.copy(folder.parents[1] / "llama/trainer/ca.pem", folder),
    "expired": made_at(-731),
    "not valid yet": made_at(1),
    "encrypted": encrypted,
    "encrypted with nothing": encrypted_with_nothing,
    "another certificate beside": with_another,
    "trusted": trusted,
    "no certificate": lambda folder: (folder / "cert.pem").write_bytes(b""),
    "no authority": lambda folder: (folder / "ca.pem").write_bytes(b"\xff"),
    "servers only": with_own(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), between=False),
    "no URI": lambda folder: OwnAuthority().write(folder, between=False),
    "two URIs": lambda folder: OwnAuthority().write(
        folder,
        x509.SubjectAlternativeName(
            [x509.UniformResourceIdentifier(uri) for uri in (URI, "checkmate:gpt/reader")]
        ),
        between=False,
    ),
    "not the whole chain": with_own(whole=False),
}
NEED_OPENSSL = {"encrypted with nothing", "trusted"}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_left_to_the_checks(trainer: Path, fault: str) -> None:
    if fault in NEED_OPENSSL and shutil.which("openssl") is None:
        pytest.skip("the command openssl makes it")
    FAULTS[fault](trainer)
    assert trial_time(trainer) is None
    with pytest.raises(KeysError):
        read_keys(trainer, "gpt", Role.TRAINER)


@pytest.mark.parametrize("between", [False, True], ids=["signs", "has another one between"])
@pytest.mark.parametrize(
    "extensions", [(), (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]),)], ids=["any", "client"]
)
def test_a_users_own_authority_is_accepted_either_way(
    trainer: Path, extensions: tuple[x509.ExtensionType, ...], between: bool
) -> None:
    with_own(*extensions, between=between)(trainer)
    assert trial_time(trainer) == (None if between else check_now(trainer))
    assert check_now(trainer) == read_keys(trainer, "gpt", Role.TRAINER).expires
