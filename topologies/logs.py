"""Logs of a lab's processes: the files `NAME.log`, and `NAME.out.log` for standard output, in its folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from topologies.describe.topology import CONTROLLER

_AT_CONTROLLER: Final = ("controller", "checkmate")
"""Processes that run beside the controller."""


@dataclass(frozen=True)
class LogLine:
    """A line that a process on a node has written, on standard error if `error`."""

    node: str
    error: bool
    text: str


class LabLogs:
    """Reader of the logs in a lab's folder, of all nodes or of some."""

    def __init__(self, folder: Path, nodes: Collection[str] | None = None) -> None:
        self._folder, self._nodes = folder, nodes
        self._files: dict[Path, BinaryIO] = {}
        """Open files, at the first byte that has not been shown."""

    @property
    def has_logs(self) -> bool:
        """Whether there are logs."""
        return bool(self._files)

    def new(self, *, whole: bool = True) -> Iterator[LogLine]:
        """Yield the lines since the last call, file by file; incomplete ones only if not `whole`."""
        for file in sorted(self._folder.glob("*.log")):
            name = file.name.removesuffix(".log")
            process = name.removesuffix(".out")
            node = CONTROLLER if process in _AT_CONTROLLER else process
            if self._nodes is None or node in self._nodes:
                for text in self._lines(file, whole):
                    yield LogLine(node, name == process, text)

    def _lines(self, file: Path, whole: bool) -> list[str]:
        lines = _rest(self._files[file], whole) if file in self._files else []
        with contextlib.suppress(FileNotFoundError):  # the lab is being removed
            if file not in self._files or not _same(self._files[file], file):  # a new process has a new log
                if file in self._files:
                    self._files[file].close()
                self._files[file] = file.open("rb")
                lines += _rest(self._files[file], whole)
        return lines


def _same(log: BinaryIO, file: Path) -> bool:
    return os.path.samestat(os.fstat(log.fileno()), file.stat())


def _rest(log: BinaryIO, whole: bool) -> list[str]:
    """Return the lines that come next in a file; an incomplete one stays unread if `whole`."""
    data = log.read()
    lines = data[: data.rfind(b"\n") + 1] if whole else data
    log.seek(len(lines) - len(data), os.SEEK_CUR)
    return [
        _as_shown(line) for line in lines.decode(errors="replace").removesuffix("\n").split("\n") if lines
    ]


def _as_shown(line: str) -> str:
    """Return what a terminal would show: carriage returns overwrite."""
    return line.rstrip("\r").rpartition("\r")[2]
