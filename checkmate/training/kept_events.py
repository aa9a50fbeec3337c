"""The event log of a rank, in the folder that the environment names."""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path
from typing import Final

from checkmate.events.event_log import FOLDER, EventLog, EventsError
from checkmate.events.process_log import keep_in

_log: Final = logging.getLogger("checkmate")


class _Process:
    """The log of this process, if it has one; or that it can have none."""

    is_decided = False


def keep_events(rank: int, job: str) -> None:
    """Keep this rank's events in $CHECKMATE_EVENTS, if that is set, until the process ends.

    A folder that can't be used is a warning: training goes on.
    """
    if _Process.is_decided or not (folder := os.environ.get(FOLDER)):
        return
    _Process.is_decided = True
    try:
        log = EventLog(f"rank {rank}", job, Path(folder)).start()
    except EventsError as error:
        _log.warning("%s; training goes on without its event log", error)
        return
    keep_in(log)
    atexit.register(log.close)  # before that of a protection, which therefore ends first
