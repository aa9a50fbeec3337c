"""Reads events that were kept on disk. Torn lines, and what is not an event, are passed over and counted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from checkmate.events.event import Event
from checkmate.opening import open_file

SUFFIX: Final = ".jsonl"
OLDER: Final = ".jsonl.1"
"""The suffix of the older file of a log."""
FILE_MAX: Final = 256 << 20
"""Bytes that are read of one file: many times what a log on disk has."""


class EventsError(RuntimeError):
    """Events cannot be read or kept; the message names the path and the reason."""

    exit_code = 2


@dataclass
class ReadEvents:
    """Events that were read, and the lines that are none, by file."""

    events: list[Event] = field(default_factory=list)
    passed_over: dict[str, int] = field(default_factory=dict)


def read_paths(paths: Iterable[Path]) -> ReadEvents:
    """Read files of events, and folders of them. Raise `EventsError` if one cannot be read or has none."""
    found = ReadEvents()
    for path in paths:
        files = _files(path)
        if not files:
            raise EventsError(f"{path}: no event log (*{SUFFIX}) in this folder")
        before = len(found.events)
        for file in files:
            read_file(file, found)
        if files == [path] and len(found.events) == before and str(path) in found.passed_over:
            raise EventsError(f"{path}: not an event log: none of its lines is an event")
    return found


def read_file(path: Path, found: ReadEvents) -> None:
    """Add a file's events to what was found. Raise `EventsError` if it cannot be read."""
    from checkmate.events.line import LINE_MAX, event_of  # noqa: PLC0415 - trainers keep only; imports take time

    strange = 0
    try:
        for line in _lines(path, LINE_MAX):
            try:
                found.events.append(event_of(line))
            except ValueError:
                strange += bool(line.strip())
    except OSError as error:
        raise EventsError(f"{path}: {error.strerror or error}") from None
    if strange:
        found.passed_over[str(path)] = strange


def _lines(path: Path, most: int) -> Iterator[bytes]:
    """Yield a file's lines, of at most `most` bytes and one."""
    left = FILE_MAX
    with open_file(path) as file:
        while left > 0 and (line := file.readline(most + 1)):
            left -= len(line)
            yield line


def _files(path: Path) -> list[Path]:
    """Return a file, or the logs in a folder, the older part of each first. Raise `EventsError`."""
    if not path.is_dir():
        return [path]
    try:
        names = sorted(name for name in os.listdir(path) if name.endswith((SUFFIX, OLDER)))
    except OSError as error:
        raise EventsError(f"{path}: {error.strerror or error}") from None
    return sorted(
        (path / name for name in names), key=lambda one: (one.name.partition(SUFFIX)[0], -len(one.name))
    )
