"""The log of this process: lines for people, the events that they tell of, and the log as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import types
from typing import Any, Final, Protocol

from checkmate.events.event import timestamp, truncate
from checkmate.events.kinds import Occurrence

FORMAT: Final = "CHECKMATE_LOG_FORMAT"
"""Environment variable of training scripts; `json` has the default log be JSON."""

_log: Final = logging.getLogger("checkmate")


class EventSink(Protocol):
    """Keeps events, as an event log does."""

    def keep(self, occurrence: Occurrence, level: int, message: str) -> None:
        """Keep an event, without blocking."""


class _Process:
    """The sink of this process's events."""

    sink: EventSink | None = None


def keep_in(sink: EventSink | None) -> None:
    """Have all events of this process kept from now on; `None`: by nobody."""
    _Process.sink = sink


def say(level: int, occurrence: Occurrence, message: str, *args: object) -> None:
    """Log a line about an event, if the log has this level, and keep the event in any case.

    An event that has no line for people is said at level DEBUG.
    """
    record = _log.makeRecord(
        _log.name, level, __file__, 0, message, args, None, extra={"event": occurrence}, func="say"
    )
    if _log.isEnabledFor(level):
        _log.handle(record)
    if _Process.sink is not None:
        _Process.sink.keep(occurrence, level, record.getMessage())


def seconds_since(began: float) -> float:
    """Return how long something took that began at that `time.monotonic()`, in milliseconds' precision."""
    return round(time.monotonic() - began, 3)


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: time, level, event, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        occurrence = getattr(record, "event", None)
        document: dict[str, Any] = {"time": timestamp(record.created), "level": record.levelname.lower()}
        if isinstance(occurrence, Occurrence):
            document["event"] = occurrence.name
        document["message"] = record.getMessage()
        document["fields"] = truncate(occurrence.fields) if isinstance(occurrence, Occurrence) else {}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def has_json_line(record: logging.LogRecord) -> bool:
    """Return whether a line of JSON is written: for people's lines, and for each event."""
    return record.levelno >= logging.INFO or isinstance(getattr(record, "event", None), Occurrence)


def json_handler() -> logging.Handler:
    """Return a handler that writes JSON on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    handler.addFilter(has_json_line)
    return handler


def log_everything_as_json() -> None:
    """Have this process write nothing but JSON on standard error: its log, warnings, uncaught errors."""
    root = logging.getLogger()
    root.addHandler(json_handler())
    root.setLevel(logging.INFO)
    logging.getLogger("checkmate").setLevel(logging.DEBUG)  # events that have no line for people
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def print_as_json(level: int, message: str) -> None:
    """Print one line of JSON on standard error, whatever the log is."""
    json_handler().handle(logging.LogRecord("checkmate", level, __file__, 0, message, (), None))


def is_json_requested() -> bool:
    """Return whether the environment asks for JSON."""
    return os.environ.get(FORMAT) == "json"


def _uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    logging.getLogger("checkmate").critical("%s", error, exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
