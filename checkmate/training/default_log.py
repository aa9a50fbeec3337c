"""A log of what `restore` and `protect` did, on standard error of some ranks, if a script has no logging."""

from __future__ import annotations

import logging
from typing import Final

from checkmate.events.process_log import is_json_requested, json_handler
from checkmate.output.log_lines import TextLines

_LOG: Final = logging.getLogger("checkmate")
_FORMAT: Final = "%(asctime)s checkmate: %(message)s"


def show_log() -> None:
    """Give the logger `checkmate` a handler if neither it nor the root logger has one.

    With CHECKMATE_LOG_FORMAT=json its lines are JSON.
    The handler is silent once the script gives the root logger one. A level that the script has set stays.
    """
    if _LOG.hasHandlers():
        return
    as_json = is_json_requested()
    handler = json_handler() if as_json else logging.StreamHandler()
    if not as_json:
        handler.setFormatter(TextLines(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    _LOG.addHandler(handler)
    if _LOG.level == logging.NOTSET:
        _LOG.setLevel(logging.DEBUG if as_json else logging.INFO)
