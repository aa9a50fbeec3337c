"""YAML files with line numbers, and faults with their location."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from checkmate.job import faults
from checkmate.job.faults import Fault, show_path


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


class Loader(yaml.SafeLoader):
    """A SafeLoader that rejects duplicate keys, which YAML forbids but PyYAML accepts."""

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
        text = file.read_text()
        data, lines = _parse(text)
    except OSError as error:
        raise JobError([Located(file, 0, "(file)", f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise JobError([Located(file, 0, "(file)", "is not valid UTF-8")]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise JobError([Located(file, line, "(YAML)", f"{error.problem}")]) from None
    except yaml.YAMLError as error:
        raise JobError([Located(file, 1, "(YAML)", str(error).splitlines()[0])]) from None
    except RecursionError:
        raise JobError([Located(file, 1, "(YAML)", "is nested too deeply, or contains itself")]) from None
    except ValueError as error:
        raise JobError([Located(file, 1, "(YAML)", f"has a value that cannot be read: {error}")]) from None
    if not isinstance(data, dict):
        raise JobError([Located(file, 1, "(top level)", f"must be a mapping of keys such as {keys}")])
    return Document(file, data, lines)


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
            lines[(*path, key.value)] = key.start_mark.line + 1
            _note_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*path, index), lines)
