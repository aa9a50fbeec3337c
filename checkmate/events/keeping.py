"""The event log of this process: its newest events in memory and, if it has a folder, in two files on disk.

A thread owns the files. Whoever keeps an event only puts it into a bounded queue, so a slow or full disk
stops nobody.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from checkmate.events.disk import Disk
from checkmate.events.event import Event, cleaned
from checkmate.events.kinds import EVENTS_LOST, Happened
from checkmate.events.reading import SUFFIX, EventsError, ReadEvents, read_file

FILE_BYTES: Final = 4 << 20
"""A log on disk has two files of at most this size."""
BEAT_SECONDS: Final = 30.0
MEMORY: Final = 2000
"""Events that are kept in memory."""
_WAITING: Final = 10_000
"""Events that wait for the disk; more are counted as lost."""
_END_SECONDS: Final = 2.0
_READ_SECONDS: Final = 5.0
FOLDER: Final = "CHECKMATE_EVENTS"
"""Environment variable with the folder of event logs."""

Beat = Callable[[], Happened | None]

_log: Final = logging.getLogger("checkmate")


def named_folder(option: Path | None) -> Path | None:
    """Return the folder of event logs that somebody has named: the option, else $CHECKMATE_EVENTS."""
    named = os.environ.get(FOLDER)
    return option or (Path(named) if named else None)


def folder_of(option: Path | None) -> Path | None:
    """Return the folder of event logs: the one that is named, else one in systemd's folder of state."""
    if (named := named_folder(option)) is not None:
        return named
    state = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(state) / "events" if state else None


def file_name(source: str, job: str) -> str:
    """Return the name of a process's file: `gpt.shadow-node-0.jsonl`."""
    words = ".".join(filter(None, (job, source.replace(" ", "-"))))
    return re.sub(r"[^A-Za-z0-9._-]", "_", words) + SUFFIX


class EventLog:
    """The events of this process. It runs between `start` and `close`, and is a `saying.Keeper`."""

    def __init__(
        self,
        source: str,
        job: str = "",
        folder: Path | None = None,
        *,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Create it.

        Args:
            source: This process: `shadow node 0`, `controller`, `rank 2`.
            job: Its job, if it has only one.
            folder: The folder on disk, which is made if need be; without one, events stay in memory.
            file_bytes: The size of each of its two files.

        Raises:
            EventsError: The folder cannot be written, or another process keeps the same log. A full disk is
                not an error.
        """
        self.source, self.job = source, job
        self.path = None if folder is None else folder / file_name(source, job)
        """The newer of the two files."""
        self.beat: Beat = lambda: None
        """Returns how far the process is. The log's thread calls it after events and every 30 s."""
        self._beaten = Happened("", {})
        self._host, self._pid = cleaned(socket.gethostname()), os.getpid()
        self._numbers = 0
        self._lock = threading.Lock()
        self._reading = threading.Semaphore()  # released by the thread that reads
        self._newest: deque[Event] = deque(maxlen=MEMORY)
        self._queue: queue.Queue[Event | None] = queue.Queue(_WAITING)
        self._lost = 0  # on disk; the thread alone reads and resets it
        self._dropped = 0  # from the queue
        self._disk = None if self.path is None else Disk(self.path, file_bytes)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> EventLog:
        """Start to write."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Write what is left, for 2 s at most."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=_END_SECONDS)
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)

    def keep(self, happened: Happened, level: int, message: str) -> None:
        """Keep an event, without blocking. Forked processes keep none."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            event = self._event(happened, logging.getLevelName(level).lower(), message)
            self._newest.append(event)
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self._dropped += 1

    def read(self) -> ReadEvents:
        """Return all events that are still kept, by time; those on disk include earlier processes'."""
        found = ReadEvents() if self._disk is None else self._read_files(self._disk.files)
        with self._lock:
            newest = list(self._newest)
        known = {event.identity: event for event in (*found.events, *newest)}
        found.events = sorted(known.values(), key=lambda event: (event.time, event.number))
        return found

    def _read_files(self, files: Iterable[Path]) -> ReadEvents:
        """Read files in a thread that is left behind if their file system does not answer, one at a time.

        What is in memory is there in any case.
        """
        answers: queue.SimpleQueue[ReadEvents] = queue.SimpleQueue()

        def read() -> None:
            found = ReadEvents()
            for path in files:
                with suppress(EventsError):
                    read_file(path, found)
            self._reading.release()
            answers.put(found)

        with suppress(queue.Empty):
            if self._reading.acquire(timeout=_READ_SECONDS):
                threading.Thread(target=read, name="event files", daemon=True).start()
                return answers.get(timeout=_READ_SECONDS)
        _log.warning("the events in %s can't be read within %g s", self.path, _READ_SECONDS)
        return ReadEvents()

    def _event(self, happened: Happened, level: str, message: str) -> Event:
        self._numbers += 1
        # Rounded as in a line, so that it is known again.
        now = round(time.time(), 6)
        return Event(
            now,
            self.source,
            happened.name,
            message,
            happened.fields,
            level,
            self.job,
            self._host,
            self._pid,
            self._numbers,
        )

    def _run(self) -> None:
        while True:
            batch, ended = self._batch()
            if (beat := self.beat()) is not None and beat != self._beaten:
                self._beaten = beat
                with self._lock:
                    event = self._event(beat, "debug", "")
                    self._newest.append(event)
                batch.append(event)
            self._write(batch)
            if ended:
                if self._disk is not None:
                    self._disk.close()
                return

    def _batch(self) -> tuple[list[Event], bool]:
        """Return the events that wait, after the first has come or the time of a beat; and whether to end."""
        batch: list[Event] = []
        try:
            while True:
                one = self._queue.get(timeout=BEAT_SECONDS) if not batch else self._queue.get_nowait()
                if one is None:
                    return batch, True
                batch.append(one)
        except queue.Empty:
            return batch, False

    def _write(self, batch: list[Event]) -> None:
        """Write events, and first how many are missing before them."""
        if self._disk is None or not batch:
            return
        with self._lock:
            self._lost, self._dropped = self._lost + self._dropped, 0
            lost = self._event(EVENTS_LOST(count=self._lost), "warning", "") if self._lost else None
        lines = [event.to_line() for event in ([lost] if lost else []) + batch]
        written = self._disk.write(lines)
        self._lost = len(lines) - written if written else self._lost + len(batch)
