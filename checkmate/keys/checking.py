"""The PEM files and keys of jobs, as `checkmate validate` finds them on this host.

A host has the files of its roles only, so of a job's keys, the folders that are here are checked. A switch's
TLS files may be absent if this host has keys of the job, but not the controller's.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from checkmate.base.wording import printable
from checkmate.job.faults import Path as YamlPath
from checkmate.job.files import JobSet, Located
from checkmate.job.schema import Job, Tls
from checkmate.keys import certificates, disk
from checkmate.keys.access import keys_folder
from checkmate.keys.errors import KeysError, Malformed
from checkmate.keys.folder import read_keys
from checkmate.keys.plans import AUTHORITY, read_authority
from checkmate.keys.roles import Role, node_hosts

_NOT_OTHERS: Final = 0o007
"""Access that nobody beside owner and group may have to a private key of a switch's connection."""


@dataclass
class KeyFindings:
    """The faults of the files of jobs, and notes about them."""

    faults: list[Located] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_files(jobs: JobSet, now: dt.datetime) -> KeyFindings:
    """Check the files that valid jobs name, as far as they are on this host. `now` has a time zone."""
    findings = KeyFindings()
    for file, job in jobs.sound:
        check = _Check(job, now, findings.notes)
        for path, message in dict.fromkeys(check.faults()):
            findings.faults.append(jobs.located(file, path, message))
    return findings


@dataclass
class _Check:
    """The check of one job's files."""

    job: Job
    now: dt.datetime
    notes: list[str]

    def faults(self) -> Iterator[tuple[YamlPath, str]]:
        """Yield each fault with the path of the key that names the file."""
        folder = keys_folder(self.job) / self.job.job
        folders = []
        for name in (AUTHORITY, *Role):
            try:
                if self._is_here(folder / name):
                    folders.append(str(name))
                    self._check_folder(folder, name)
            except KeysError as error:
                yield ("keys",), str(error)
        serves = not folders or Role.CONTROLLER in folders
        for number, switch in enumerate(self.job.fabric.switches):
            if switch.tls is not None:
                for key, message in self._tls_faults(switch.tls, serves):
                    yield ("fabric", "switches", number, "tls", key), message

    def _is_here(self, folder: Path) -> bool:
        """Return whether a role's folder is on this host, and may be read."""
        try:
            os.scandir(folder).close()
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            wrong = folder if folder.parent.is_dir() else folder.parent
            raise KeysError(f"{wrong} is not a folder of keys; move it away") from None
        except PermissionError:
            self.notes.append(f"keys of another user are not checked: {printable(str(folder))}")
            return False
        return True

    def _check_folder(self, folder: Path, name: str) -> None:
        if name == AUTHORITY:
            read_authority(self.job, folder)
            return
        role = Role(name)
        hosts = node_hosts(self.job) if role is Role.SHADOW else ()
        read_keys(folder / name, self.job.job, role, hosts=hosts, now=self.now)

    def _tls_faults(self, tls: Tls, serves: bool) -> Iterator[tuple[str, str]]:
        files = {key: pem for key, pem in vars(tls).items() if pem is not None}
        if not serves and not any(map(os.path.exists, files.values())):
            return  # they are the controller's, which is another host
        parsed: dict[str, Any] = {}
        for key, pem in files.items():
            try:
                parsed[key] = self._parse(key, pem)
            except (KeysError, Malformed) as error:
                yield key, str(error)
        match parsed.get("cert"), parsed.get("ca"):
            case [*chain], [*authorities] if not certificates.is_signed(chain, authorities):
                why = "right only if the switch admits clients of another authority"
                self.notes.append(f"{tls.cert} is not signed by {tls.ca}: {why}")
        match parsed.get("cert"), parsed.get("key"):
            case [leaf, *_], private if private and not certificates.belongs(leaf, private):
                yield "key", f"{tls.key} is not the private key of {tls.cert}"

    def _parse(self, key: str, pem: Path) -> Any:
        """Return a file's private key or certificates. Raise `KeysError` or `Malformed` if that fails."""
        content = disk.read_private(pem, _NOT_OTHERS if key == "key" else 0)
        if content is None:
            raise KeysError(f"{pem} cannot be read: No such file or directory")
        try:
            if key == "key":
                return certificates.load_private_key(content)
            chain = certificates.load_certificates(content)
        except Malformed as error:
            raise Malformed(f"{pem} {error}") from None
        if fault := certificates.time_fault(chain[0], self.now):
            raise Malformed(f"{pem} {fault}")
        return chain
