"""The secrets of jobs by which the controller recognises hellos of their shadow nodes."""

from __future__ import annotations

from collections.abc import Iterable

from checkmate.job.schema import Job
from checkmate.keys.access import access
from checkmate.keys.errors import KeysError
from checkmate.keys.roles import Role, Secret


class HelloKeys:
    """Reads the secret `hello.key` of jobs."""

    def __init__(self, *, insecure: bool = False, remember: bool = False) -> None:
        """Prepare. With `insecure`, no keys are used: whoever can send from a NIC can connect its streams.

        With `remember`, the key of a job that has not changed is read once, so that an owner who takes it
        away does not keep other owners' jobs from changing.
        """
        self._insecure = insecure
        self._remember = remember
        self._read: dict[str, tuple[Job, bytes]] = {}

    def of(self, jobs: Iterable[Job]) -> dict[str, bytes]:
        """Return the secret of each job, by name. Raise `KeysError` if one can't be used."""
        return {job.job: self._one(job) for job in jobs}

    def unusable(self, job: Job) -> str | None:
        """Return why a job's keys can't be used, if so."""
        try:
            self._one(job)
        except KeysError as error:
            return str(error)
        return None

    def _one(self, job: Job) -> bytes:
        known = self._read.get(job.job)
        if self._remember and known is not None and known[0] == job:
            return known[1]
        key = access(job, Role.CONTROLLER, insecure=self._insecure).secret(Secret.HELLO)
        self._read[job.job] = job, key
        return key
