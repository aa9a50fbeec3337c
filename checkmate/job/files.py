"""Read job files: YAML to `Job`, with all faults at once, each with file, line and path."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkmate.job import checks, conflicts, host_copies, yaml_lines
from checkmate.job.faults import Fault, show_path
from checkmate.job.faults import Path as YamlPath
from checkmate.job.kept import CheckedJob
from checkmate.job.placing import Placing, place
from checkmate.job.schema import Job
from checkmate.job.tofino import ports
from checkmate.job.yaml_lines import Document, JobError, Located, beside, resolve_tls

if TYPE_CHECKING:
    from checkmate.job.fabric_file import Granted

__all__ = [
    "JobError",
    "JobSet",
    "Located",
    "is_fabric",
    "locate",
    "read_job",
    "read_jobs",
    "read_set",
]

ReadYaml = Callable[[Path], Document]
"""`read_document`, perhaps with a cache, so that a file is parsed once however often it is asked for."""


@dataclass(frozen=True)
class JobSet:
    """Job files of jobs that share switches: the valid jobs, and every fault of the others.

    `files`: all files that were read, fabric files included, in the order in which faults are reported.
    `granted`: the operator's fabric file, which is then the jobs' fabric.
    """

    sound: tuple[tuple[Path, Job], ...]
    faults: tuple[Located, ...]
    files: tuple[Path, ...]
    granted: Granted | None = None
    operators: Path | None = None
    """The operator's fabric file, faulty or not."""

    @property
    def jobs_read(self) -> bool:
        """Whether there is a job file, sound or not."""
        return len(self.files) > (self.operators is not None)

    def located(self, file: Path, path: YamlPath, message: str) -> Located:
        """Return a fault of a valid job of these files, which may be in its fabric file."""
        if self.granted is not None and path[:1] == ("fabric",):
            return self.granted.document.locate(Fault(path[1:], message))
        return Located(*locate(file, path, self.granted), show_path(path), message)

    def require(self, more: Iterable[Located] = ()) -> list[Job]:
        """Return all jobs. Raise `JobError` with all faults, here and in `more`, sorted by file and line."""
        # Not by Path.resolve, which raises for a link to itself.
        place = {os.path.realpath(file): number for number, file in reversed(list(enumerate(self.files)))}
        faults = sorted(
            dict.fromkeys([*self.faults, *more]),
            key=lambda fault: (place.get(os.path.realpath(fault.file), len(place)), fault.line),
        )
        if faults:
            raise JobError(faults)
        return [job for _, job in self.sound]


@dataclass(frozen=True)
class _Source:
    """A job file that is valid YAML.

    `raw`: its data, with the fabric file's data in place, and device ports instead of front-panel names.
    """

    document: Document
    fabric: Document | None
    raw: Any
    unnamed: tuple[Fault, ...] = ()
    """Ports whose front-panel name has no device port."""
    placing: Placing = field(default_factory=Placing)
    """How ranks got their hosts' addresses."""

    def locate(self, fault: Fault) -> Located:
        if self.fabric is not None and fault.path[:1] == ("fabric",):
            return self.fabric.locate(Fault(fault.path[1:], fault.message))
        return self.document.locate(fault)


def read_job(file: Path) -> Job:
    """Read one job file. Raise `JobError` with every fault in it and in its fabric file."""
    (job,) = read_jobs([file])
    return job


def read_checked(file: Path) -> CheckedJob:
    """Read one job file, as `read_job` does, with the fingerprints of all files that were read."""
    fingerprints: dict[Path, str | None] = {}

    @cache
    def read(file_read: Path) -> Document:
        document = yaml_lines.read_document(file_read)
        fingerprints[file_read] = document.fingerprint
        return document

    (job,) = read_set([file], read).require()
    return CheckedJob(job, fingerprints)


def read_jobs(files: Sequence[Path]) -> list[Job]:
    """Read job files of jobs that share switches. Raise `JobError` with every fault in and between them."""
    return read_set(files).require()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from searching what is being read, which has no garbage and is large.

    That took a quarter of the time for 4,096 ranks.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def read_set(files: Sequence[Path], read: ReadYaml | None = None, granted: Granted | None = None) -> JobSet:
    """Read job files of jobs that share switches: each by itself, then against each other.

    A fault in one part of a file hides no fault elsewhere, and none that another job has with the file.
    Each file is parsed once, fabric files that several jobs name included; `read` may have parsed some.

    With `granted`, each job has its grant, and a job that claims more has no effect on others. Then no file
    that a job names as its fabric is read: its owner may not be allowed to read that file.
    """
    read = read or cache(yaml_lines.read_document)
    faults: list[Located] = []
    sources: list[_Source] = []
    jobs: list[Job | None] = []
    order: list[Path] = []
    for file in files:
        order.append(file)
        source, source_faults = _source(file, read, granted)
        faults += source_faults
        if source is None:
            continue
        if source.fabric is not None and granted is None:
            order.append(source.fabric.file)
        if host_copies.concerns(source.raw):
            job, wrong = host_copies.read(source.raw)
            faults += [source.locate(fault) for fault in wrong]
            sources.append(source)
            jobs.append(job)
            continue
        job, structural = checks.structure(source.raw)
        reported = {fault.path for fault in source.unnamed}
        placing = source.placing
        wrong = [fault for fault in placing.located_faults(structural) if fault.path not in reported]
        wrong = [
            *source.unnamed,
            *placing.faults,
            *wrong,
            *placing.located_faults(checks.within_job(source.raw)),
        ]
        if job is not None and not wrong:
            wrong = list(checks.beyond_the_collective(job))
        wrong = list(dict.fromkeys(wrong))
        if job is None and not wrong:
            wrong = structural  # a file is a job, or has a fault
        if granted is not None:
            wrong += _beyond_grants(source, job, wrong, granted)
        if source_faults:  # the fabric can't be read, which is reported already
            wrong = [fault for fault in wrong if fault.path != ("fabric",)]
        faults += [source.locate(fault) for fault in wrong]
        sources.append(source)
        jobs.append(None if source_faults or wrong else job)
    operators = None
    if granted is not None:  # jobs that claim what is another's are no reason to refuse that one
        sources = [source for source, job in zip(sources, jobs, strict=True) if job is not None]
        jobs = [replace(job, fabric=granted.fabric) for job in jobs if job is not None]
        operators = granted.document.file
        order.insert(0, operators)
    compared = [_compared(source.raw, granted) for source in sources]
    for index, fault in conflicts.between_jobs(compared, [str(source.document.file) for source in sources]):
        faults.append(sources[index].locate(fault))
        jobs[index] = None
    sound = [(s.document.file, job) for s, job in zip(sources, jobs, strict=True) if job is not None]
    return JobSet(tuple(sound), tuple(faults), tuple(order), granted, operators)


def _beyond_grants(source: _Source, job: Job | None, wrong: Sequence[Fault], granted: Granted) -> list[Fault]:
    """Return what a job claims beyond its grant. What is faulty already is not said twice."""
    from checkmate.job import grants  # noqa: PLC0415 - trainers have none, and imports take time

    reported = {fault.path for fault in wrong}
    faults = [
        fault
        for fault in grants.refusals(source.raw, source.document.file, granted)
        if fault.path not in reported
    ]
    if job is not None and not faults:
        faults += grants.not_covered(job, granted)
    if job is not None and job.job in granted.grants:
        faults += grants.too_many_streams(job, granted)
    return faults


def _compared(raw: Any, granted: Granted | None) -> Any:
    """Return a job's data to compare with others; all jobs with grants have the operator's fabric."""
    return raw if granted is None else {**raw, "fabric": granted.raw}


def locate(file: Path, path: YamlPath, granted: Granted | None = None) -> tuple[Path, int]:
    """Return the file, the job's or its fabric's, and the line of a path in a job."""
    regular = partial(yaml_lines.read_document, regular=True)  # a pipe has nothing a second time
    source, faults = _source(file, regular, granted)
    if source is None:
        raise JobError(faults)
    located = source.locate(Fault(path, ""))
    return located.file, located.line


def is_fabric(data: Any) -> bool:
    """Return whether a YAML file's data is a fabric's, which a job file names with its key `fabric`."""
    return isinstance(data, dict) and "switches" in data and not {"job", "dp_groups"} & data.keys()


def _source(
    file: Path, read: ReadYaml, granted: Granted | None = None
) -> tuple[_Source | None, list[Located]]:
    """Read a job file and its fabric. Return what can be read, and the reasons for the rest."""
    try:
        document = read(file)
    except JobError as error:
        return None, list(error.faults)
    raw = copy.deepcopy(document.data)
    if is_fabric(raw):
        message = "this is a fabric file; pass the job file that refers to it (key fabric)"
        return None, [Located(file, 0, "(file)", message)]
    if raw.get("copies") == "host":  # whose fabric, if it names one, is a fault already
        _resolve_paths(raw, document.file.parent, document.file.parent)
        return _Source(document, None, raw), []
    fabric = None
    faults: list[Located] = []
    if isinstance(raw.get("fabric"), str) and granted is not None:
        fabric, raw["fabric"] = granted.document, copy.deepcopy(granted.raw)
    elif isinstance(raw.get("fabric"), str):
        try:
            fabric = _fabric_document(document, raw["fabric"], read)
            raw["fabric"] = {
                key: copy.deepcopy(value) for key, value in fabric.data.items() if key != "grants"
            }
        except JobError as error:
            faults = list(error.faults)
            del raw["fabric"]
    _resolve_paths(raw, document.file.parent, (fabric or document).file.parent)
    unnamed = tuple(ports.resolve(raw))
    return _Source(document, fabric, raw, unnamed, place(raw)), faults


def _resolve_paths(raw: dict[str, Any], folder: Path, fabric_folder: Path) -> None:
    """Resolve the names of keys and TLS files against the folder of the file that contains them."""
    resolve_tls(raw.get("fabric"), fabric_folder)
    if isinstance(keys := raw.get("keys") or "keys", str):
        raw["keys"] = str(beside(folder, keys))


def _fabric_document(document: Document, name: str, read: ReadYaml) -> Document:
    """Read the fabric file that a job names, relative to the job's folder."""
    if "\0" in name:
        raise JobError([document.locate(Fault(("fabric",), "must be the path of a file"))])
    try:
        return read(beside(document.file.parent, name))
    except JobError as error:
        if error.faults[0].path == "(file)":
            message = f"the fabric file {name} {error.faults[0].message}"
            raise JobError([document.locate(Fault(("fabric",), message))]) from None
        raise
