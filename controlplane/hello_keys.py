"""The secrets of jobs by which the controller recognises hellos of their shadow nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from checkmate.job.schema import Job
from checkmate.keys.access import access, insecure_everywhere
from checkmate.keys.errors import KeysError
from checkmate.keys.roles import CA_FILE, CERT_FILE, KEY_FILE, Role, Secret, role_folder


class HelloKeys:
    """Reads the secret `hello.key` of jobs."""

    def __init__(self, *, insecure: bool = False, remember: bool = False) -> None:
        """Prepare. With `insecure`, no keys are used: whoever can send from a NIC can connect its streams.

        With `remember`, the key of a job that is served stays good if there is no other any longer, so that
        an owner who takes it away does not keep other owners' jobs from changing.
        """
        self._insecure = insecure
        self._remember = remember
        self._served: dict[str, tuple[Job, bytes]] = {}

    def secrets(self, jobs: Iterable[Job]) -> dict[str, bytes]:
        """Return the secret of each job, by name. Raise `KeysError` if one can't be used."""
        return {job.job: self._secret(job) for job in jobs}

    def note_served(self, jobs: Iterable[Job], keys: Mapping[str, bytes]) -> None:
        """Remember the secrets of the jobs that are served now."""
        if self._remember:
            self._served = {job.job: (job, keys[job.job]) for job in jobs}

    def unusable(self, job: Job) -> str | None:
        """Return why a job's keys can't be used, if so."""
        try:
            self._secret(job)
        except KeysError as error:
            return str(error)
        return None

    def files(self, job: Job) -> list[Path]:
        """Return the files that are read for a job."""
        if self._insecure or insecure_everywhere() or job.keys is None:
            return []
        folder = role_folder(job.keys, job.job, Role.CONTROLLER)
        return [folder, *(folder / name for name in (CA_FILE, CERT_FILE, KEY_FILE, Secret.HELLO))]

    def _secret(self, job: Job) -> bytes:
        try:
            return access(job, Role.CONTROLLER, insecure=self._insecure).secret(Secret.HELLO)
        except KeysError:
            served = self._served.get(job.job)
            if served is not None and served[0] == job:
                return served[1]
            raise
