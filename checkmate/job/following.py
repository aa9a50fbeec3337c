"""The job files of a command line, with those of folders, read again when they change.

With an operator's fabric file, the files are of several owners: a faulty one does not keep others from
changing, and what is served of its job stays as it was.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from checkmate.base.wording import counted, printable, shortened
from checkmate.events.event import MAX_TEXT
from checkmate.job import yaml_lines
from checkmate.job.files import JobSet, ReadYaml, is_fabric, read_set
from checkmate.job.schema import Job
from checkmate.job.yaml_lines import Document, JobError, Located

LOG: Final = logging.getLogger("checkmate")
ABSENCE_SECONDS: Final = 5.0
SUFFIXES: Final = (".yaml", ".yml")
Stamp = tuple[int, int, int]
"""When a file was written, when that or its mode, owner or name changed, and its size."""
Signature = dict[Path, Stamp]
Unusable = Callable[[Job], str | None]
"""Returns why a valid job can't be served, such as keys that are missing."""
Beside = Callable[[Job], Iterable[Path]]
"""Returns other files of a job that are followed like its own, such as keys. They may be missing."""


def job_files(
    arguments: Iterable[Path], read: ReadYaml | None = None, *, several_owners: bool = False
) -> list[Path]:
    """Return the job files that a command line names: files, and the YAML files of folders, sorted.

    Fabric files in folders are left out. `read` parses the files of folders. A file that has two names is
    listed once; with several owners under both, so that no owner's link takes the place of another's file.
    """
    read = read or cache(yaml_lines.read_document)
    files: list[Path] = []
    for argument in arguments:
        if _is_folder(argument):
            files += [file for file in _yaml_files(argument) if not _is_fabric(file, read)]
        else:
            files.append(argument)
    same = os.path.abspath if several_owners else os.path.realpath
    return list({same(file): file for file in files}.values())


@dataclass(frozen=True)
class JobsToServe:
    """The jobs to serve, by file, and the faults of files that can't be followed."""

    by_file: Mapping[Path, Job]
    faults: tuple[Located, ...] = ()
    files: tuple[Path, ...] = ()
    """All files that were read; empty without any job file."""
    fabric: Any = field(default=None, compare=False)
    """The data of the operator's fabric file, to which the jobs' grants belong."""

    @property
    def jobs(self) -> list[Job]:
        """The jobs to serve."""
        return list(self.by_file.values())


_FAULTS_OF_FILE: Final = 5
_FAULTS_SHOWN: Final = 20
"""Lines of a message about faults. An owner may have thousands of faulty files, and change them often."""


class FaultLog:
    """The faults that the log has, so that each is there once, however often files change."""

    def __init__(self) -> None:
        self._logged: set[Located] = set()
        self._queue: list[Located] = []

    def news(self, faults: Sequence[Located]) -> str:
        """Return lines about some faults that the log lacks, the longest known first; "" if it has each.

        The last line counts the others.
        """
        present = set(faults)
        self._logged &= present
        queue = [fault for fault in self._queue if fault in present]
        reported = self._logged.union(queue)
        queue += dict.fromkeys(fault for fault in faults if fault not in reported)
        by_file: Counter[Path] = Counter()
        new_faults: list[Located] = []
        for fault in queue:
            by_file[fault.file] += 1
            if by_file[fault.file] <= _FAULTS_OF_FILE and len(new_faults) < _FAULTS_SHOWN:
                new_faults.append(fault)
        self._logged.update(new_faults)
        self._queue = [fault for fault in queue if fault not in self._logged]
        lines = [shortened(str(fault), MAX_TEXT) for fault in new_faults]
        if new_faults and (omitted := len(present) - len(new_faults)):
            lines.append(f"and {counted(omitted, 'other fault')}; `checkmate validate` shows all")
        return "\n".join(lines)


class JobFiles:
    """The job files of a command line, read again whenever they have changed."""

    def __init__(
        self, arguments: Sequence[Path], fabric: Path | None = None, beside: Beside = lambda _: ()
    ) -> None:
        """Prepare, without reading. `fabric`: the operator's fabric file, if there are several owners."""
        self._arguments = arguments
        self._fabric = fabric
        self._beside = beside
        self._read: tuple[Path, ...] = ()
        self._read_stamps: Signature | None = None
        self._served = JobsToServe({})
        self._absences = Absences()
        self._documents: dict[Path, Document] = {}
        self.fault_log = FaultLog()

    def __str__(self) -> str:
        return ", ".join(str(argument) for argument in self._arguments)

    @property
    def several_owners(self) -> bool:
        """Whether there is an operator's fabric file, so that owners are kept apart."""
        return self._fabric is not None

    def read(self) -> JobSet:
        """Read all files, each once. From the second time on, a named file that is gone is a removed job.

        A file that is gone, and may come back, is read as it last was.
        """
        first, before = self._read_stamps is None, self._signature()
        parse: ReadYaml = yaml_lines.read_document
        if self.several_owners:  # nobody's FIFO keeps the controller waiting
            parse = partial(yaml_lines.read_document, regular=True)
        documents: dict[Path, Document] = {}

        def read(file: Path) -> Document:
            if file not in documents:
                if file not in before and (stamp := _stamp(file)):  # a fabric file, the first time
                    before[file] = stamp
                documents[file] = parse(file)
            return documents[file]

        files = job_files(self._arguments, read, several_owners=self.several_owners)
        files = [file for file in files if first or os.path.lexists(file)]
        away = self._awaited(files, read)
        documents |= {file: self._documents[file] for file in away if file in self._documents}
        jobs = self._checked([*away, *files], read)  # others have the fault if they claim the same
        documents_now = self._documents | documents  # of a file with a fault, what it was before
        self._documents = {file: documents_now[file] for file in (*files, *away) if file in documents_now}
        self._read = (*jobs.files, *(file for _, job in jobs.sound for file in self._beside(job)))
        now = self._signature()
        self._read_stamps = now | {
            file: before[file] for file in before.keys() & now
        }  # written meanwhile: changed
        return jobs

    def _awaited(self, files: Iterable[Path], read: ReadYaml) -> list[Path]:
        """Return the files of served jobs that are gone, but not for long. Log each once.

        A job that another file has now was moved: its old file is not awaited.
        """
        absent = [file for file in self._served.by_file if not os.path.lexists(file)]
        names = {_job_name(file, read) for file in files} if absent else set()
        absent = [file for file in absent if self._served.by_file[file].job not in names]
        now = time.monotonic()
        for file in self._absences.note(absent, now):
            name, seconds = printable(str(file)), ABSENCE_SECONDS
            LOG.warning("%s: gone; unless it comes back in %g s, its job ends", name, seconds)
        return self._absences.awaited(now)

    def jobs_to_serve(self, unusable: Unusable) -> JobsToServe:
        """Read all files; return the jobs to serve.

        With several owners, a file with a fault leaves its job as `served` told, or out if it was not served.

        Raises:
            JobError: A file has a fault, and there is one owner; or the fabric file has one, or has changed
                while a job's file is faulty, so that nobody knows whether what is served is still granted.
        """
        job_set = self.read()
        if not self.several_owners:  # then unusable keys are found when they are used
            job_set.require()
            return JobsToServe(dict(job_set.sound), files=job_set.files)
        if job_set.granted is None:
            raise JobError(job_set.faults)
        faults, data = list(job_set.faults), job_set.granted.document.data
        sound = dict(job_set.sound)
        for file, job in job_set.sound:
            if why := unusable(job):
                faults.append(job_set.located(file, ("keys",), why))
                del sound[file]
        stay = {file: job for file, job in self._served.by_file.items() if file in job_set.files}
        unread = {file: job for file, job in stay.items() if file not in sound}
        owners = {job.job: file for file, job in unread.items()}
        for file, job in list(sound.items()):
            if (served := owners.get(job.job)) is not None:  # the file that is served stays, with its fault
                faults.append(job_set.located(file, ("job",), f"{served} has this job, and is served"))
                del sound[file]
        by_file = {**stay, **sound}
        names = {job.job for job in by_file.values()}
        if len(names) < len(by_file) or (unread and data != self._served.fabric):
            raise JobError(faults)
        return JobsToServe(by_file, tuple(faults), job_set.files if job_set.jobs_read else (), data)

    def note_served(self, job_set: JobsToServe) -> None:
        """Take note that these jobs are served now."""
        self._served = replace(job_set, faults=())

    def have_changed(self) -> bool:
        """Return whether a file was added, removed or written since `read`, or is awaited no more."""
        return self._signature() != self._read_stamps or self._absences.over(time.monotonic())

    def _checked(self, files: Sequence[Path], read: ReadYaml) -> JobSet:
        """Read job files, with their grants. If the fabric file has a fault, no job is sound."""
        if self._fabric is None:
            return read_set(files, read)
        from checkmate.job.fabric_file import read_fabric  # noqa: PLC0415 - most have none; imports take time

        try:
            granted = read_fabric(self._fabric, read)
        except JobError as error:  # without grants, nothing of the jobs can be judged
            return JobSet((), error.faults, (self._fabric, *files), None, self._fabric)
        return read_set(files, read, granted)

    def _signature(self) -> Signature:
        """Return name, time and size of all files in the folders, and of those that count."""
        files_named = (
            _yaml_files(argument) if _is_folder(argument) else [argument] for argument in self._arguments
        )
        signature: Signature = {}
        for file in {*self._read, *(file for files in files_named for file in files)}:
            if stamp := _stamp(file):
                signature[file] = stamp
        return signature


class Absences:
    """Job files that are gone, and may come back: `mv`, `git checkout` and rsync remove a file to write it.

    A job would lose its copies meanwhile, so it stays for `ABSENCE_SECONDS` after its file was first missed.
    """

    def __init__(self) -> None:
        self._since: dict[Path, float] = {}
        self._awaited: list[Path] = []

    def note(self, absent: Collection[Path], now: float) -> list[Path]:
        """Note the files that are gone now; return those that were not when this was last called."""
        new = [file for file in absent if file not in self._since]
        self._since = {file: self._since.get(file, now) for file in absent}
        return new

    def awaited(self, now: float) -> list[Path]:
        """Return the files that may still come back."""
        self._awaited = [file for file, since in self._since.items() if now < since + ABSENCE_SECONDS]
        return self._awaited

    def over(self, now: float) -> bool:
        """Return whether a file that `awaited` last returned is not awaited any more."""
        return any(now >= self._since[file] + ABSENCE_SECONDS for file in self._awaited)


def _job_name(file: Path, read: ReadYaml) -> object:
    """Return the name of a file's job, or `None` if that can't be read, which is reported elsewhere."""
    try:
        return read(file).data.get("job")
    except JobError:
        return None


def _stamp(file: Path) -> Stamp | None:
    """Return what changes if a file does; `None` if it was removed, or no file can have the name."""
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder that can be listed. Reading another as a file reports it."""
    try:
        os.scandir(path).close()
    except OSError:
        return False
    return True


def _yaml_files(folder: Path) -> Iterator[Path]:
    try:
        files = sorted(folder.iterdir())
    except OSError:
        return  # removed meanwhile
    candidates = (file for file in files if file.suffix in SUFFIXES and not file.name.startswith("."))
    yield from (
        file for file in candidates if os.path.isfile(file) or not os.path.exists(file)
    )  # a FIFO would block


def _is_fabric(file: Path, read: ReadYaml) -> bool:
    try:
        return is_fabric(read(file).data)
    except JobError:
        return False  # reported when it is read as a job
