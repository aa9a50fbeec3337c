"""The event log of this process: its newest events in memory and, if it has a folder, in two files on disk.

A thread owns the files. Whoever keeps an event only puts it into a bounded queue, so a slow or full disk
stops nobody.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import re
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from checkmate.events.event import Event, clean_host
from checkmate.events.kinds import EVENTS_LOST, Occurrence

SUFFIX: Final = ".jsonl"
OLDER: Final = ".jsonl.1"
"""The suffix of the older file of a log."""
MAX_FILE_BYTES: Final = 4 << 20
"""A log on disk has two files of at most this size."""
BEAT_SECONDS: Final = 30.0
MAX_RECENT: Final = 2000
"""Events that are kept in memory."""
_MAX_QUEUED: Final = 10_000
"""Events that wait for the disk; more are counted as lost."""
_MAX_NAMESAKES: Final = 8
"""Processes of one name that keep events in a folder, such as two controllers; each has files of its own."""
_END_SECONDS: Final = 2.0
_READ_SECONDS: Final = 5.0
FOLDER: Final = "CHECKMATE_EVENTS"
"""Environment variable with the folder of event logs."""

Beat = Callable[[], Occurrence | None]

_log: Final = logging.getLogger("checkmate")


class EventsError(RuntimeError):
    """Events cannot be read or kept; the message names the path and the reason."""

    exit_code = 2


class LogInUse(EventsError):
    """Another process keeps its events in that file."""


@dataclass
class ReadEvents:
    """Events that were read, and the lines that are none, by file."""

    events: list[Event] = field(default_factory=list)
    passed_over: dict[str, int] = field(default_factory=dict)


def configured_folder(option: Path | None) -> Path | None:
    """Return the folder of event logs that is configured: the option, else $CHECKMATE_EVENTS."""
    folder = os.environ.get(FOLDER)
    return option or (Path(folder) if folder else None)


def find_folder(option: Path | None) -> Path | None:
    """Return the folder of event logs: the configured one, else one in systemd's folder of state."""
    if (folder := configured_folder(option)) is not None:
        return folder
    state = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(state) / "events" if state else None


def file_name(source: str, job: str) -> str:
    """Return the name of a process's file: `gpt.shadow-node-0.jsonl`."""
    words = ".".join(filter(None, (job, source.replace(" ", "-"))))
    return re.sub(r"[^A-Za-z0-9._-]", "_", words) + SUFFIX


class EventLog:
    """The events of this process. It runs between `start` and `close`, and is a `process_log.EventSink`."""

    def __init__(
        self,
        source: str,
        job: str = "",
        folder: Path | None = None,
        *,
        file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Create it.

        Args:
            source: This process: `shadow node 0`, `controller`, `rank 2`.
            job: Its job, if it has only one.
            folder: The folder on disk, which is made if need be; without one, events stay in memory.
            file_bytes: The size of each of its two files.

        Raises:
            EventsError: The folder cannot be written, or 8 processes of this name keep events there. A full
                disk is not an error.
        """
        self.source, self.job = source, job
        self.beat: Beat = lambda: None
        """Returns how far the process is. The log's thread calls it after events and every 30 s."""
        self._last_beat = Occurrence("", {})
        self._host, self._pid = clean_host(socket.gethostname()), os.getpid()
        self._event_count = 0
        self._lock = threading.Lock()
        self._reader_free = threading.Semaphore()  # released by the thread that reads
        self._recent_events: deque[Event] = deque(maxlen=MAX_RECENT)
        self._queue: queue.Queue[Event | None] = queue.Queue(_MAX_QUEUED)
        self._lost_count = 0  # on disk; the thread alone reads and resets it
        self._dropped_count = 0  # from the queue
        self._files = None if folder is None else _free_files(folder / file_name(source, job), file_bytes)
        self.path = None if self._files is None else self._files.paths[1]
        """The newer of the two files."""
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

    def keep(self, occurrence: Occurrence, level: int, message: str) -> None:
        """Keep an event, without blocking. Forked processes keep none."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            event = self._event(occurrence, logging.getLevelName(level).lower(), message)
            self._recent_events.append(event)
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self._dropped_count += 1

    def read(self) -> ReadEvents:
        """Return all events that are still kept, by time; those on disk include earlier processes'."""
        result = ReadEvents() if self._files is None else self._read_files(self._files.paths)
        with self._lock:
            newest = list(self._recent_events)
        events = {event.identity: event for event in (*result.events, *newest)}
        result.events = sorted(events.values(), key=lambda event: (event.time, event.number))
        return result

    def _read_files(self, files: Iterable[Path]) -> ReadEvents:
        """Read files in a thread that is left behind if their file system does not answer, one at a time.

        What is in memory is there in any case.
        """
        answers: queue.SimpleQueue[ReadEvents] = queue.SimpleQueue()

        def read() -> None:
            # Here, because trainers only write: pydantic takes time to import.
            from checkmate.events.reading import read_file  # noqa: PLC0415

            result = ReadEvents()
            for path in files:
                with suppress(EventsError):
                    read_file(path, result)
            self._reader_free.release()
            answers.put(result)

        with suppress(queue.Empty):
            if self._reader_free.acquire(timeout=_READ_SECONDS):
                threading.Thread(target=read, name="event files", daemon=True).start()
                return answers.get(timeout=_READ_SECONDS)
        _log.warning("the events in %s can't be read within %g s", self.path, _READ_SECONDS)
        return ReadEvents()

    def _event(self, occurrence: Occurrence, level: str, message: str) -> Event:
        self._event_count += 1
        # Rounded as in a line, so that `read` recognises the event.
        now = round(time.time(), 6)
        return Event(
            now,
            self.source,
            occurrence.name,
            message,
            occurrence.fields,
            level,
            self.job,
            self._host,
            self._pid,
            self._event_count,
        )

    def _run(self) -> None:
        while True:
            batch, is_last = self._batch()
            if (beat := self.beat()) is not None and beat != self._last_beat:
                self._last_beat = beat
                with self._lock:
                    event = self._event(beat, "debug", "")
                    self._recent_events.append(event)
                batch.append(event)
            self._write(batch)
            if is_last:
                if self._files is not None:
                    self._files.close()
                return

    def _batch(self) -> tuple[list[Event], bool]:
        """Return the events that wait, after the first has come or the time of a beat; and whether to end."""
        batch: list[Event] = []
        try:
            while True:
                event = self._queue.get(timeout=BEAT_SECONDS) if not batch else self._queue.get_nowait()
                if event is None:
                    return batch, True
                batch.append(event)
        except queue.Empty:
            return batch, False

    def _write(self, batch: list[Event]) -> None:
        """Write events, and first how many are missing before them."""
        if self._files is None or not batch:
            return
        with self._lock:
            self._lost_count, self._dropped_count = self._lost_count + self._dropped_count, 0
            gap = (
                self._event(EVENTS_LOST(count=self._lost_count), "warning", "") if self._lost_count else None
            )
        lines = [event.to_line() for event in ([gap] if gap else []) + batch]
        count = self._files.write(lines)
        self._lost_count = len(lines) - count if count else self._lost_count + len(batch)


class LogFiles:
    """The two files of a log on disk: the newer one is appended to.

    Only the log's thread may use it, once it is created.
    """

    def __init__(self, path: Path, file_bytes: int) -> None:
        self._path, self._max_bytes = path, file_bytes
        self.paths = (path.with_name(path.name.removesuffix(SUFFIX) + OLDER), path)
        """The older one first."""
        self._file = -1
        self._size = 0
        self._ends_with_newline = True  # the last byte is the end of a line
        self._has_warned = False
        self._lock_file = self._folder = -1
        try:
            self._open()
        except OSError as error:
            if not _is_temporary(error):
                self.close()
                why = error.strerror or str(error)
                if path.parent.exists() and not path.parent.is_dir():
                    path, why = path.parent, "it is not a folder"
                raise EventsError(f"events can't be kept in {path}: {why}") from None
            self._trouble(error)

    def write(self, lines: list[str]) -> int:
        """Append lines. Return how many are in the file; log the first failure of several."""
        count = 0
        try:
            for line in lines:
                self._append(f"{line}\n".encode())
                count += 1
            os.fdatasync(self._file)
        except (OSError, EventsError) as error:
            self._trouble(error)
        else:
            self._has_warned = False
        return count

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._lock_file, self._folder):
            if file >= 0:
                os.close(file)
        self._file = self._lock_file = self._folder = -1

    def _append(self, data: bytes) -> None:
        if self._file < 0:
            self._open()
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        if not self._ends_with_newline:
            data = b"\n" + data
        size = os.write(self._file, data)
        self._size += size
        self._ends_with_newline = size == len(data)
        if not self._ends_with_newline:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rotate(self) -> None:
        """Begin a file. Whatever fails, the next write opens again."""
        os.close(self._file)
        self._file = -1
        with suppress(FileNotFoundError):  # somebody has moved it
            names = (self._path.name, self.paths[0].name)
            os.replace(*names, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._open()

    def _open(self) -> None:
        """Open the newer file, in a folder that this process has locked, each of which is made if need be."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open_folder()
        self._lock()
        self._file = _open_file(self._path.name, self._folder, os.O_APPEND)
        self._size = os.fstat(self._file).st_size
        # A process that was killed may have left half a line.
        self._ends_with_newline = not self._size or os.pread(self._file, 1, self._size - 1) == b"\n"

    def _open_folder(self) -> None:
        """Open the folder again, which may have been moved away.

        Where another user can change its path, as root's in that user's home, no link is followed.
        """
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = folder
        if os.readlink(f"/proc/self/fd/{folder}") != str(_trusted_place(self._path.parent)):
            raise PermissionError(errno.EPERM, "a link of another user leads elsewhere")

    def _lock(self) -> None:
        """Lock the log, also if its folder was moved away with the lock."""
        path = self._path.with_name(f".{self._path.name}.lock")
        if self._lock_file >= 0 and path.exists():
            return
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        self._lock_file = _open_locked(path, self._folder)

    def _trouble(self, error: OSError | EventsError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "events are not kept in %s for now: %s; this process goes on",
                self._path,
                (error.strerror if isinstance(error, OSError) else None) or error,
            )


def _free_files(path: Path, file_bytes: int) -> LogFiles:
    """Return a log's files: `controller.jsonl`, or `controller.2.jsonl` if another process keeps that."""
    name = path.name.removesuffix(SUFFIX)
    for number in range(2, _MAX_NAMESAKES + 1):
        try:
            return LogFiles(path, file_bytes)
        except LogInUse:
            path = path.with_name(f"{name}.{number}{SUFFIX}")
    return LogFiles(path, file_bytes)


def _open_file(name: str, folder: int, flags: int = 0) -> int:
    """Open a file of the folder, made if need be. Raise `OSError` for links, pipes and second names."""
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, 0o600, dir_fd=folder)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(file)
        raise PermissionError(errno.EPERM, "it is not a file of its own")
    return file


def _trusted_place(folder: Path) -> Path:
    """Return where a path leads if no link is followed that another user than root can have made."""
    trusted_users = {0, os.geteuid()}
    place, trusted = Path("/"), True
    for part in Path(os.path.abspath(folder)).parts[1:]:
        trusted = trusted and place.lstat().st_uid in trusted_users
        place /= part
        if trusted and place.is_symlink() and place.lstat().st_uid in trusted_users:
            place = Path(os.path.realpath(place))
    return place


def _open_locked(path: Path, folder: int) -> int:
    """Return a file that this process alone has locked. Raise `EventsError` if another one has."""
    file = _open_file(path.name, folder)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise  # a file system without locks
        log = path.name.removeprefix(".").removesuffix(".lock")
        raise LogInUse(
            f"another process keeps the events of {path.parent / log}; specify another folder for this one"
        ) from None
    return file


def _is_temporary(error: OSError) -> bool:
    """Return whether a failure may pass, such as a full disk, or one that is read-only after an error."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.ENOLCK)
