"""Reads the events of files and answers. Torn lines, and what is not an event, are passed over and counted.

Other processes have written these lines: nothing in them can harm a reader.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from checkmate.base.opening import open_file
from checkmate.events.event import Event, clean_host
from checkmate.events.event_log import OLDER, SUFFIX, EventsError, ReadEvents

MAX_LINE: Final = 64 << 10
"""Bytes of a line; a longer one is not an event."""
MAX_TIME: Final = dt.datetime(9000, 1, 1, tzinfo=dt.UTC).timestamp()
"""Times are from 1970 to this one, so that each can be shown in any zone."""
_MAX_NAME: Final = 100
_MAX_NUMBER: Final = 2**63 - 1
MAX_FILE: Final = 256 << 20
"""Bytes that are read of one file: many times what a log on disk has."""


def read_paths(paths: Iterable[Path]) -> ReadEvents:
    """Read files of events, and folders of them. Raise `EventsError` if one cannot be read or has none."""
    result = ReadEvents()
    for path in paths:
        files = _files(path)
        if not files:
            raise EventsError(f"{path}: no event log (*{SUFFIX}) in this folder")
        before = len(result.events)
        for file in files:
            read_file(file, result)
        if files == [path] and len(result.events) == before and str(path) in result.passed_over:
            raise EventsError(f"{path}: not an event log: none of its lines is an event")
    return result


def read_file(path: Path, result: ReadEvents) -> None:
    """Add a file's events to what was found. Raise `EventsError` if it cannot be read."""
    strange = 0
    try:
        for line in _lines(path, MAX_LINE):
            try:
                result.events.append(parse_event(line))
            except ValueError:
                strange += bool(line.strip())
    except OSError as error:
        raise EventsError(f"{path}: {error.strerror or error}") from None
    if strange:
        result.passed_over[str(path)] = strange


def _lines(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield a file's lines, of at most `max_bytes` bytes and one."""
    remaining = MAX_FILE
    with open_file(path) as file:
        while remaining > 0 and (line := file.readline(max_bytes + 1)):
            remaining -= len(line)
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
        (path / name for name in names), key=lambda file: (file.name.partition(SUFFIX)[0], -len(file.name))
    )


def parse_event(line: str | bytes) -> Event:
    """Return the event of a line. Raise `ValueError` if it is not one."""
    if len(line) > MAX_LINE:
        raise ValueError(f"a line of {len(line):,} bytes")
    try:
        read = _Line.model_validate_json(line)
        time = dt.datetime.fromisoformat(read.time).timestamp()
    except (ValidationError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if not 0 <= time < MAX_TIME:
        raise ValueError(f"{read.time} is not in the years from 1970 to 8999")
    return Event(
        time,
        read.source,
        read.event,
        read.message,
        read.fields,
        read.level,
        read.job,
        read.host,
        read.pid,
        read.number,
    )


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields. Raise `ValueError` if one has a number that is too large to calculate with."""
    for value in fields.values():
        if isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER:
            raise ValueError("a number without bounds")
    return fields


def _printable(text: str) -> str:
    """Return a name. Raise `ValueError` if it could steer the terminal that it is shown on."""
    if not text.isprintable():
        raise ValueError(f"{text!r} is not printable")
    return text


_Name = Annotated[str, Field(min_length=1, max_length=_MAX_NAME), AfterValidator(_printable)]
_Number = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]


class _Line(BaseModel):
    """An event as JSON. Later versions may add keys."""

    model_config = ConfigDict(strict=True)

    time: Annotated[str, Field(max_length=40)]
    source: _Name
    event: _Name
    message: str = ""
    fields: Annotated[dict[str, Any], AfterValidator(_finite)] = {}
    level: str = "info"
    job: Annotated[str, Field(max_length=_MAX_NAME), AfterValidator(_printable)] = ""
    host: Annotated[str, AfterValidator(clean_host)] = ""
    pid: _Number = 0
    number: _Number = 0
