"""Read job files: YAML to `Job`, with all faults at once, each with file, line and path. Follow changes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from checkmate.job import checks, conflicts, yaml_lines
from checkmate.job import faults as parts
from checkmate.job.faults import Fault
from checkmate.job.placing import Placing, place
from checkmate.job.schema import Job
from checkmate.job.tofino import ports
from checkmate.job.yaml_lines import Document, JobError, Located

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
    """

    sound: tuple[tuple[Path, Job], ...]
    faults: tuple[Located, ...]
    files: tuple[Path, ...]

    def require(self, more: Iterable[Located] = ()) -> list[Job]:
        """Return all jobs. Raise `JobError` with all faults, here and in `more`, sorted by file and line."""
        place = {file.resolve(): number for number, file in reversed(list(enumerate(self.files)))}
        faults = sorted(
            dict.fromkeys([*self.faults, *more]),
            key=lambda fault: (place.get(fault.file.resolve(), len(place)), fault.line),
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


def read_jobs(files: Sequence[Path]) -> list[Job]:
    """Read job files of jobs that share switches. Raise `JobError` with every fault in and between them."""
    return read_set(files).require()


def read_set(files: Sequence[Path], read: ReadYaml | None = None) -> JobSet:
    """Read job files of jobs that share switches: each by itself, then against each other.

    A fault in one part of a file hides no fault elsewhere, and none that another job has with the file.
    Each file is parsed once, fabric files that several jobs name included; `read` may have parsed some.
    """
    read = read or cache(yaml_lines.read_document)
    faults: list[Located] = []
    sources: list[_Source] = []
    jobs: list[Job | None] = []
    order: list[Path] = []
    for file in files:
        order.append(file)
        source, found = _source(file, read)
        faults += found
        if source is None:
            continue
        if source.fabric is not None:
            order.append(source.fabric.file)
        job, wrong = checks.structure(source.raw)
        said = {fault.path for fault in source.unnamed}
        placing = source.placing
        wrong = [fault for fault in placing.told(wrong) if fault.path not in said]
        wrong = [*source.unnamed, *placing.faults, *wrong, *placing.told(checks.within_job(source.raw))]
        if job is not None and not wrong:
            wrong = list(checks.beyond_the_plugin(job))
        wrong = list(dict.fromkeys(wrong))
        if found:  # the fabric can't be read, which is reported already
            wrong = [fault for fault in wrong if fault.path != ("fabric",)]
        faults += [source.locate(fault) for fault in wrong]
        sources.append(source)
        jobs.append(None if found or wrong else job)
    for index, fault in conflicts.between_jobs([source.raw for source in sources]):
        faults.append(sources[index].locate(fault))
        jobs[index] = None
    sound = [(s.document.file, job) for s, job in zip(sources, jobs, strict=True) if job is not None]
    return JobSet(tuple(sound), tuple(faults), tuple(order))


def locate(file: Path, path: parts.Path) -> tuple[Path, int]:
    """Return the file, the job's or its fabric's, and the line of a path in a job."""
    source, faults = _source(file, yaml_lines.read_document)
    if source is None:
        raise JobError(faults)
    found = source.locate(Fault(path, ""))
    return found.file, found.line


def is_fabric(data: Any) -> bool:
    """Return whether a YAML file's data is a fabric's, which a job file names with its key `fabric`."""
    return isinstance(data, dict) and "switches" in data and not {"job", "dp_groups"} & data.keys()


def _source(file: Path, read: ReadYaml) -> tuple[_Source | None, list[Located]]:
    """Read a job file and its fabric. Return what can be read, and the reasons for the rest."""
    try:
        document = read(file)
    except JobError as error:
        return None, list(error.faults)
    raw = copy.deepcopy(document.data)
    if is_fabric(raw):
        message = "this is a fabric file; pass the job file that refers to it (key fabric)"
        return None, [Located(file, 0, "(file)", message)]
    fabric = None
    faults: list[Located] = []
    if isinstance(raw.get("fabric"), str):
        try:
            fabric = _fabric_document(document, raw["fabric"], read)
            raw["fabric"] = copy.deepcopy(fabric.data)
        except JobError as error:
            faults = list(error.faults)
            del raw["fabric"]
    _resolve_paths(raw, document.file.parent, (fabric or document).file.parent)
    unnamed = tuple(ports.resolve(raw))
    return _Source(document, fabric, raw, unnamed, place(raw)), faults


def _resolve_paths(raw: dict[str, Any], folder: Path, fabric_folder: Path) -> None:
    """Resolve the names of keys and TLS files against the folder of the file that contains them."""
    fabric = raw.get("fabric")
    switches = fabric.get("switches") if isinstance(fabric, dict) else None
    for switch in switches if isinstance(switches, list) else []:
        tls = switch.get("tls") if isinstance(switch, dict) else None
        if isinstance(tls, dict):
            files = {key: str(fabric_folder / value) for key, value in tls.items() if isinstance(value, str)}
            tls.update(files)
    if isinstance(keys := raw.get("keys") or "keys", str):
        raw["keys"] = str(folder / keys)


def _fabric_document(document: Document, named: str, read: ReadYaml) -> Document:
    """Read the fabric file that a job names, relative to the job's folder."""
    if "\0" in named:
        raise JobError([document.locate(Fault(("fabric",), "must be the path of a file"))])
    try:
        return read(document.file.parent / named)
    except JobError as error:
        if error.faults[0].path == "(file)":
            message = f"the fabric file {named} {error.faults[0].message}"
            raise JobError([document.locate(Fault(("fabric",), message))]) from None
        raise


SUFFIXES = (".yaml", ".yml")
Signature = dict[Path, tuple[int, int]]


def job_files(arguments: Iterable[Path], read: ReadYaml | None = None) -> list[Path]:
    """Return the job files that a command line names: files, and the YAML files of folders, sorted.

    Fabric files in folders are left out. `read` parses the files of folders.
    """
    read = read or cache(yaml_lines.read_document)
    files: list[Path] = []
    for argument in arguments:
        if _is_folder(argument):
            files += [file for file in _yaml_files(argument) if not _is_fabric(file, read)]
        else:
            files.append(argument)
    return list({file.resolve(): file for file in files}.values())


class JobFiles:
    """The job files of a command line, read again whenever they have changed."""

    def __init__(self, arguments: Sequence[Path]) -> None:
        self._arguments = arguments
        self._read: tuple[Path, ...] = ()
        self._seen: Signature | None = None

    def __str__(self) -> str:
        return ", ".join(str(argument) for argument in self._arguments)

    def read(self) -> JobSet:
        """Read all files, each once. From the second time on, a named file that is gone is a removed job."""
        read, first, before = cache(yaml_lines.read_document), self._seen is None, self._signature()
        files = job_files(self._arguments, read)
        found = read_set([file for file in files if first or file.exists()], read)
        self._read = found.files
        self._seen = {**self._signature(), **before}  # a file that is written while it is read has changed
        return found

    def changed(self) -> bool:
        """Return whether a file was added, removed or written since the last `read`."""
        return self._signature() != self._seen

    def _signature(self) -> Signature:
        """Return name, time and size of all files in the folders, and of those that were read."""
        named = (_yaml_files(one) if _is_folder(one) else [one] for one in self._arguments)
        found: Signature = {}
        for file in {*self._read, *(file for files in named for file in files)}:
            try:
                stat = file.stat()
            except OSError:
                continue  # removed after the listing
            found[file] = stat.st_mtime_ns, stat.st_size
        return found


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder that can be listed. Reading another as a file reports it."""
    try:
        os.scandir(path).close()
    except OSError:
        return False
    return True


def _yaml_files(folder: Path) -> Iterator[Path]:
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return  # removed meanwhile
    named = (file for file in found if file.suffix in SUFFIXES and not file.name.startswith("."))
    yield from (
        file for file in named if os.path.isfile(file) or not os.path.exists(file)
    )  # a FIFO would block


def _is_fabric(file: Path, read: ReadYaml) -> bool:
    try:
        return is_fabric(read(file).data)
    except JobError:
        return False  # reported when it is read as a job
