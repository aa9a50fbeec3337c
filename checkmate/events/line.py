"""Reads an event's line of JSON, which another process has written: nothing in it can harm a reader. Pure."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from checkmate.events.event import Event, cleaned

LINE_MAX: Final = 64 << 10
"""Bytes of a line; a longer one is not an event."""
TIME_END: Final = dt.datetime(9000, 1, 1, tzinfo=dt.UTC).timestamp()
"""Times are from 1970 to this one, so that each can be shown in any zone."""
_NAME_MAX: Final = 100
_NUMBER_MAX: Final = 2**63 - 1


def event_of(line: str | bytes) -> Event:
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
        if isinstance(value, int | float) and not abs(value) <= _NUMBER_MAX:
            raise ValueError("a number without bounds")
    return fields


def _printable(text: str) -> str:
    """Return a name. Raise `ValueError` if it could steer the terminal that it is shown on."""
    if not text.isprintable():
        raise ValueError(f"{text!r} is not printable")
    return text


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
