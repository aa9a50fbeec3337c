"""YAML files with line numbers, and faults with their location."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from checkmate.job import faults
from checkmate.job.faults import Fault, show_path
from checkmate.job.yaml_loader import FILE_BYTES, Loader


@dataclass(frozen=True)
class Located:
    """A fault with its location in a file; line 0 if it concerns the whole file."""

    file: Path
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else f"{self.file}"
        return f"{place}: {self.path}: {self.message}"


class JobError(Exception):
    """Job files, or files of the kind that `where` names, cannot be used; `faults` has all reasons."""

    where = "the job files"

    def __init__(self, faults: Sequence[Located]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


@dataclass(frozen=True)
class Document:
    """A parsed YAML file: its data, and the line of each path."""

    file: Path
    data: Any
    lines: dict[faults.Path, int]

    def locate(self, fault: Fault) -> Located:
        """Return the fault with its line, or the line of the nearest existing parent."""
        path = fault.path
        while path and path not in self.lines:
            path = path[:-1]
        return Located(self.file, self.lines.get(path, 1), show_path(fault.path), fault.message)


def read_document(file: Path, keys: str = "job: and fabric:") -> Document:
    """Parse a YAML file that is a mapping with keys such as `keys`. Raise `JobError` if it is not."""
    try:
        data, lines = _parse(_read(file))
    except OSError as error:
        raise JobError([Located(file, 0, "(file)", f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise JobError([Located(file, 0, "(file)", "is not valid UTF-8")]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise JobError([Located(file, line, "(YAML)", f"{error.problem}")]) from None
    except yaml.YAMLError as error:
        raise JobError([Located(file, 1, "(YAML)", str(error).splitlines()[0])]) from None
    except (ValueError, OverflowError) as error:  # the scanner's, for an escape such as "\\UFFFFFFFF"
        raise JobError([Located(file, 1, "(YAML)", f"has a value that cannot be read: {error}")]) from None
    if not isinstance(data, dict):
        raise JobError([Located(file, 1, "(top level)", f"must be a mapping of keys such as {keys}")])
    return Document(file, data, lines)


def _read(file: Path) -> str:
    """Return a file's text. Raise `JobError` if it is too large, whatever the size that it reports."""
    with file.open("rb") as opened:
        content = opened.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        message = f"is larger than {FILE_BYTES >> 20} MiB, the most that a YAML file may have"
        raise JobError([Located(file, 0, "(file)", message)])
    return content.decode()


def _parse(text: str) -> tuple[Any, dict[faults.Path, int]]:
    """Return a document's data, and the line of each path in it."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[faults.Path, int] = {}
        _note_lines(node, (), lines)
        return (None if node is None else loader.construct_document(node)), lines
    finally:
        loader.dispose()


def _note_lines(node: Any, path: faults.Path, lines: dict[faults.Path, int]) -> None:
    if node is None:
        return  # an empty file
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # no fault's path leads through others
                lines[(*path, key.value)] = key.start_mark.line + 1
                _note_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*path, index), lines)
