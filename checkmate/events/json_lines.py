"""The log as JSON: each record is one line, with its event if it tells of one."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import types
from typing import Any, Final

from checkmate.events.event import bounded, timestamp
from checkmate.events.kinds import Happened

FORMAT: Final = "CHECKMATE_LOG_FORMAT"
"""Environment variable of training scripts; `json` has the default log be JSON."""


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: time, level, event, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        happened = getattr(record, "event", None)
        said: dict[str, Any] = {"time": timestamp(record.created), "level": record.levelname.lower()}
        if isinstance(happened, Happened):
            said["event"] = happened.name
        said["message"] = record.getMessage()
        said["fields"] = bounded(happened.fields) if isinstance(happened, Happened) else {}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def is_told(record: logging.LogRecord) -> bool:
    """Return whether a line of JSON is written: for people's lines, and for each event."""
    return record.levelno >= logging.INFO or isinstance(getattr(record, "event", None), Happened)


def json_handler() -> logging.Handler:
    """Return a handler that writes JSON on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    handler.addFilter(is_told)
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


def wanted() -> bool:
    """Return whether the environment asks for JSON."""
    return os.environ.get(FORMAT) == "json"


def _uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    logging.getLogger("checkmate").critical("%s", error, exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
