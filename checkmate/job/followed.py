"""The job files of a command line: their list, and whether they have changed since they were read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from checkmate.job import yaml_lines
from checkmate.job.files import JobSet, ReadYaml, is_fabric, read_set
from checkmate.job.yaml_lines import JobError

SUFFIXES = (".yaml", ".yml")
Signature = dict[Path, tuple[int, int]]


def job_files(arguments: Iterable[Path], read: ReadYaml | None = None) -> list[Path]:
    """Return the job files that a command line names: files, and the YAML files of folders, sorted.

    Fabric files in folders are left out. `read` parses the files of folders.
    """
    read = read or cache(yaml_lines.read_document)
    files: list[Path] = []
    for argument in arguments:
        if argument.is_dir():
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
        named = (_yaml_files(one) if one.is_dir() else [one] for one in self._arguments)
        found: Signature = {}
        for file in {*self._read, *(file for files in named for file in files)}:
            try:
                stat = file.stat()
            except OSError:
                continue  # removed after the listing
            found[file] = stat.st_mtime_ns, stat.st_size
        return found


def _yaml_files(folder: Path) -> Iterator[Path]:
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return  # removed meanwhile
    yield from (file for file in found if file.suffix in SUFFIXES and not file.name.startswith("."))


def _is_fabric(file: Path, read: ReadYaml) -> bool:
    try:
        return is_fabric(read(file).data)
    except JobError:
        return False  # reported when it is read as a job
