"""Reading job files: YAML to `Job`, with every fault at once, each with its file, line and path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from checkmate import checks
from checkmate.checks import Fault, show_path
from checkmate.schema import Job

JOB_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Located:
    """A fault with the place in its file."""

    file: Path
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else f"{self.file}"
        return f"{place}: {self.path}: {self.message}"


class JobError(Exception):
    """Job files that can't be used; `faults` has every reason."""

    def __init__(self, faults: Sequence[Located]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML forbids and PyYAML lets pass."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            self.flatten_mapping(node)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class _Document:
    """A parsed YAML file: its data, and the line of each path."""

    file: Path
    data: Any
    lines: dict[checks.Path, int]

    def locate(self, fault: Fault) -> Located:
        path = fault.path
        while path and path not in self.lines:
            path = path[:-1]
        return Located(self.file, self.lines.get(path, 1), show_path(fault.path), fault.message)


def read_job(file: Path) -> Job:
    """Read one job file; `JobError` with every fault in it (and in its fabric file)."""
    job, faults = _read(file)
    if faults or job is None:
        raise JobError(faults)
    return job


def read_jobs(files: Sequence[Path]) -> list[Job]:
    """Read job files that are to run side by side; `JobError` with every fault in and between them."""
    jobs: list[Job] = []
    sources: list[Path] = []
    faults: list[Located] = []
    for file in files:
        job, found = _read(file)
        faults += found
        if job is not None and not found:
            jobs.append(job)
            sources.append(file)
    for index, fault in checks.between_jobs(jobs):
        faults.append(_document(sources[index]).locate(fault))
    if faults:
        raise JobError(faults)
    return jobs


def job_files(arguments: Iterable[Path]) -> list[Path]:
    """The job files that a command line names: files, and the YAML files of folders, sorted.

    A folder's file without a `job` key, a fabric for one, is passed over.
    """
    files: list[Path] = []
    for argument in arguments:
        if argument.is_dir():
            found = sorted(
                p for p in argument.iterdir() if p.suffix in JOB_SUFFIXES and not p.name.startswith(".")
            )
            files += [p for p in found if not _is_fabric(p)]
        else:
            files.append(argument)
    return list({file.resolve(): file for file in files}.values())


def _is_fabric(file: Path) -> bool:
    try:
        data = yaml.load(file.read_text(), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # reported when it is read as a job
    return isinstance(data, dict) and "job" not in data and "switches" in data


def locate(file: Path, path: checks.Path) -> tuple[Path, int]:
    """A job file, and the line at which something stands in it."""
    found = _document(file).locate(Fault(path, ""))
    return found.file, found.line


def fabric_files(file: Path) -> list[Path]:
    """The separate fabric file that a job file names, if it can be told."""
    try:
        named = _document(file).data.get("fabric")
    except JobError:
        return []
    return [file.parent / named] if isinstance(named, str) and "\0" not in named else []


def _read(file: Path) -> tuple[Job | None, list[Located]]:
    try:
        document = _document(file)
        fabric = _fabric_document(document)
    except JobError as error:
        return None, list(error.faults)
    raw = document.data
    if fabric is not None:
        raw = {**raw, "fabric": fabric.data}
    _resolve_tls(raw.get("fabric"), (fabric or document).file.parent)
    job, faults = checks.structure(raw)
    faults += checks.within_job(raw)
    return job, [_locate(fault, document, fabric) for fault in faults]


def _resolve_tls(fabric: Any, folder: Path) -> None:
    """TLS files are named from the folder of the file that names them."""
    switches = fabric.get("switches") if isinstance(fabric, dict) else None
    for switch in switches if isinstance(switches, list) else []:
        tls = switch.get("tls") if isinstance(switch, dict) else None
        if isinstance(tls, dict):
            tls.update({key: str(folder / value) for key, value in tls.items() if isinstance(value, str)})


def _locate(fault: Fault, document: _Document, fabric: _Document | None) -> Located:
    if fabric is not None and fault.path[:1] == ("fabric",):
        return fabric.locate(Fault(fault.path[1:], fault.message))
    return document.locate(fault)


def _fabric_document(document: _Document) -> _Document | None:
    """The separate fabric file that a job names, resolved from the job's own folder."""
    named = document.data.get("fabric") if isinstance(document.data, dict) else None
    if not isinstance(named, str):
        return None
    if "\0" in named:
        raise JobError([document.locate(Fault(("fabric",), "must be the path of a file"))])
    try:
        return _document(document.file.parent / named)
    except JobError as error:
        if error.faults[0].path == "(file)":
            message = f"the fabric file {named} {error.faults[0].message}"
            raise JobError([document.locate(Fault(("fabric",), message))]) from None
        raise


def _document(file: Path) -> _Document:
    try:
        text = file.read_text()
        data = yaml.load(text, Loader=_Loader)
        lines: dict[checks.Path, int] = {}
        _note_lines(yaml.compose(text, Loader=_Loader), (), lines)
    except OSError as error:
        raise JobError([Located(file, 0, "(file)", f"can't be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise JobError([Located(file, 0, "(file)", "is no text in UTF-8")]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise JobError([Located(file, line, "(YAML)", f"{error.problem}")]) from None
    except yaml.YAMLError as error:
        raise JobError([Located(file, 1, "(YAML)", str(error).splitlines()[0])]) from None
    except RecursionError:
        raise JobError([Located(file, 1, "(YAML)", "is nested too deeply, or contains itself")]) from None
    except ValueError as error:
        raise JobError([Located(file, 1, "(YAML)", f"has a value that can't be read: {error}")]) from None
    if not isinstance(data, dict):
        raise JobError(
            [Located(file, 1, "(top level)", "must be a mapping of keys such as job: and fabric:")]
        )
    return _Document(file, data, lines)


def _note_lines(node: Any, path: checks.Path, lines: dict[checks.Path, int]) -> None:
    if node is None:
        return  # an empty file
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[(*path, key.value)] = key.start_mark.line + 1
            _note_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*path, index), lines)
