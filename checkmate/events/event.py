"""One event, and the line of JSON that it is in logs on disk and in answers of shadow nodes. Pure."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

TEXT_MAX: Final = 600
"""Characters of a text in an event; the rest is cut off."""
LIST_MAX: Final = 64
"""Entries of a list in an event."""
LINE_MAX: Final = 64 << 10
"""Bytes of a line; a longer one is not an event."""
TIME_END: Final = dt.datetime(9000, 1, 1, tzinfo=dt.UTC).timestamp()
"""Times are from 1970 to this one, so that each can be shown in any zone."""
_NAME_MAX: Final = 100
_HOST_MAX: Final = 255
_NUMBER_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to one process, by the clock of its host."""

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
        """What is the same if an event is read from two places."""
        return (self.source, self.host, self.pid, self.time, self.number)

    @property
    def process(self) -> tuple[str, str, int]:
        """The process of an event. In a container, another start of it may have the same pid."""
        return (self.source, self.host, self.pid)

    def to_line(self) -> str:
        """Return one line of JSON, without its end."""
        said = {
            "time": timestamp(self.time),
            "source": self.source,
            "job": self.job,
            "host": self.host,
            "pid": self.pid,
            "number": self.number,
            "level": self.level,
            "event": self.name,
            "message": bounded(self.message),
            "fields": bounded(self.fields),
        }
        return json.dumps(said, separators=(",", ":"), default=str)

    @classmethod
    def of_line(cls, line: str | bytes) -> Event:
        """Return the event of a line. Raise `ValueError` if it is not one."""
        if len(line) > LINE_MAX:
            raise ValueError(f"a line of {len(line):,} bytes")
        try:
            read = _Line.model_validate_json(line)
            time = dt.datetime.fromisoformat(read.time).timestamp()
        except (ValidationError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if not 0 <= time < TIME_END:
            raise ValueError(f"{read.time} is not in the years from 1970 to 8999")
        return cls(
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
        if isinstance(value, int | float) and not abs(value) <= _NUMBER_MAX:
            raise ValueError("a number without bounds")
    return fields


def _printable(text: str) -> str:
    """Return a name. Raise `ValueError` if it could steer the terminal that it is shown on."""
    if not text.isprintable():
        raise ValueError(f"{text!r} is not printable")
    return text


def cleaned(text: str) -> str:
    """Return a host's name, which that host is free to choose, without what steers a terminal."""
    return "".join(one if one.isprintable() else " " for one in text[:_HOST_MAX])


_Name = Annotated[str, Field(min_length=1, max_length=_NAME_MAX), AfterValidator(_printable)]
_Number = Annotated[int, Field(ge=0, le=_NUMBER_MAX)]


class _Line(BaseModel):
    """An event as JSON. Later versions may add keys."""

    model_config = ConfigDict(strict=True)

    time: Annotated[str, Field(max_length=40)]
    source: _Name
    event: _Name
    message: str = ""
    fields: Annotated[dict[str, Any], AfterValidator(_finite)] = {}
    level: str = "info"
    job: Annotated[str, Field(max_length=_NAME_MAX), AfterValidator(_printable)] = ""
    host: Annotated[str, AfterValidator(cleaned)] = ""
    pid: _Number = 0
    number: _Number = 0


def timestamp(seconds: float) -> str:
    """Return a time as RFC 3339 has it: UTC, with microseconds."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def bounded(value: Any) -> Any:
    """Return a value that JSON can express, with texts and lists cut to a length."""
    match value:
        case str():
            return value if len(value) <= TEXT_MAX else f"{value[: TEXT_MAX - 3]}..."
        case Mapping():
            return {str(key): bounded(one) for key, one in list(value.items())[:LIST_MAX]}
        case Sequence() | set() | frozenset():
            return [bounded(one) for one in list(value)[:LIST_MAX]]
        case bool() | int() | float() | None:
            return value
        case _:
            return bounded(str(value))
