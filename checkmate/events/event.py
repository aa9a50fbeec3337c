"""One event, which is a line of JSON in logs on disk and in answers of shadow nodes. Pure."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MAX_TEXT: Final = 600
"""Characters of a text in an event; the rest is cut off."""
MAX_LIST: Final = 64
"""Entries of a list in an event."""
_MAX_HOST: Final = 255


@dataclass(frozen=True, slots=True)
class Event:
    """An occurrence in one process, by the clock of its host."""

    time: float
    """Seconds since the epoch."""
    source: str
    """The process: `shadow node 0`, `controller`, `rank 2`."""
    name: str
    message: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    level: str = "info"
    job: str = ""
    """Empty for a process that serves several jobs."""
    host: str = ""
    pid: int = 0
    number: int = 0
    """Counts the process's events."""

    @property
    def identity(self) -> tuple[str, str, int, float, int]:
        """A key that is equal if an event is read from two places."""
        return (self.source, self.host, self.pid, self.time, self.number)

    @property
    def process(self) -> tuple[str, str, int]:
        """The process of an event. In a container, another start of it may have the same pid."""
        return (self.source, self.host, self.pid)

    def to_line(self) -> str:
        """Return one line of JSON, without its end."""
        document = {
            "time": timestamp(self.time),
            "source": self.source,
            "job": self.job,
            "host": self.host,
            "pid": self.pid,
            "number": self.number,
            "level": self.level,
            "event": self.name,
            "message": truncate(self.message),
            "fields": truncate(self.fields),
        }
        return json.dumps(document, separators=(",", ":"), default=str)


def clean_host(text: str) -> str:
    """Return a host's name, which that host is free to choose, without what steers a terminal."""
    return "".join(character if character.isprintable() else " " for character in text[:_MAX_HOST])


def timestamp(seconds: float) -> str:
    """Return a time as RFC 3339 has it: UTC, with microseconds."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def truncate(value: Any) -> Any:
    """Return a value that JSON can express, with texts and lists cut to a length."""
    match value:
        case str():
            return value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 3]}..."
        case Mapping():
            return {str(key): truncate(element) for key, element in list(value.items())[:MAX_LIST]}
        case Sequence() | set() | frozenset():
            return [truncate(element) for element in list(value)[:MAX_LIST]]
        case bool() | int() | float() | None:
            return value
        case _:
            return truncate(str(value))
