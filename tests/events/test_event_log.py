"""Event logs on disk: bounded, private, whole after a crash, and no burden on the process."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkmate.cli.common import open_event_log
from checkmate.events import event_log, reading
from checkmate.events.event import Event
from checkmate.events.event_log import (
    MAX_RECENT,
    EventLog,
    EventsError,
    LogFiles,
    ReadEvents,
    file_name,
    find_folder,
)
from checkmate.events.kinds import ITERATION_COMMITTED, NODE_ENDED, NODE_TROUBLE
from checkmate.events.process_log import keep_in, say
from checkmate.events.reading import parse_event, read_file, read_paths
from tests.support.labs.live import needs_root
from tests.support.waiting import wait_until

NOBODY = 65534


def names(folder: Path) -> list[str]:
    return [event.name for event in read_paths([folder]).events]


def closed_log(folder: Path | None, *troubles: str, file_bytes: int = 4 << 20) -> EventLog:
    """Return a log, which is closed, after these events."""
    log = EventLog("shadow node 0", "gpt", folder, file_bytes=file_bytes).start()
    for why in troubles:
        log.keep(NODE_TROUBLE(why=why), logging.ERROR, why)
    log.close()
    return log


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    log = closed_log(tmp_path / "events", "a \N{SNOWMAN}", "b\nc")
    assert log.path == tmp_path / "events" / "gpt.shadow-node-0.jsonl"
    result = read_paths([tmp_path / "events"])
    assert result.passed_over == {}
    assert [(event.name, event.message, event.fields, event.level) for event in result.events] == [
        ("node.trouble", "a \N{SNOWMAN}", {"why": "a \N{SNOWMAN}"}, "error"),
        ("node.trouble", "b\nc", {"why": "b\nc"}, "error"),
    ]
    first = result.events[0]
    assert (first.source, first.job, first.pid) == ("shadow node 0", "gpt", os.getpid())
    assert abs(first.time - time.time()) < 60
    assert log.read().events == result.events, "what is on disk and in memory is the same event"


def test_others_can_not_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    log = closed_log(folder, "a")
    assert log.path is not None
    assert (folder.stat().st_mode & 0o777, log.path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_log_goes_on_where_a_killed_process_has_stopped_within_a_line(tmp_path: Path) -> None:
    log = closed_log(tmp_path, "a", "b")
    assert log.path is not None
    data = log.path.read_bytes()
    log.path.write_bytes(data[:-20])
    closed_log(tmp_path, "c")
    result = read_paths([tmp_path])
    assert [event.message for event in result.events] == ["a", "c"]
    assert result.passed_over == {str(log.path): 1}


@pytest.mark.parametrize(
    "line",
    [
        b"\x00" * 100,
        b"[]",
        b'{"time": "2026-11-23T10:00:00Z"}',
        b'{"time": "yesterday", "source": "a", "event": "b"}',
        b'{"time": "2026-11-23T10:00:00Z", "source": "a", "event": 3}',
        b'{"time": "9999-12-31T23:59:59.9+00:00", "source": "", "event": "b"}',
        b"{" * 5000,
        b"9" * (1 << 17),
        "\N{SNOWMAN}".encode("utf-16"),
    ],
)
def test_what_is_no_event_is_passed_over(tmp_path: Path, line: bytes) -> None:
    log = closed_log(tmp_path, "a")
    assert log.path is not None
    log.path.write_bytes(line + b"\n" + log.path.read_bytes())
    result = read_paths([log.path])
    assert [event.message for event in result.events] == ["a"]
    assert result.passed_over[str(log.path)] >= 1


def test_two_files_of_a_size_are_kept(tmp_path: Path) -> None:
    log = EventLog("shadow node 0", "gpt", tmp_path, file_bytes=20_000).start()
    for number in range(400):
        log.keep(NODE_TROUBLE(why=f"{number}"), logging.ERROR, f"{number}")
    log.close()
    assert log.path is not None
    older = log.path.with_name(log.path.name + ".1")
    assert sorted(tmp_path.glob("gpt*")) == [log.path, older]
    assert all(10_000 < file.stat().st_size <= 20_000 for file in (log.path, older))
    numbers = [int(event.message) for event in read_paths([tmp_path]).events]
    assert numbers == list(range(numbers[0], 400)), "the newest, in order, and none twice"
    assert [int(event.message) for event in log.read().events] == list(range(400)), "memory has more"


def test_memory_is_bounded_and_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHECKMATE_EVENTS", raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert find_folder(None) is None
    log = closed_log(None, *map(str, range(MAX_RECENT + 5)))
    assert [event.message for event in log.read().events] == [str(n) for n in range(5, MAX_RECENT + 5)]


def test_the_folder_is_the_option_else_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/checkmate:/var/lib/other")
    monkeypatch.delenv("CHECKMATE_EVENTS", raising=False)
    assert find_folder(None) == Path("/var/lib/checkmate/events")
    monkeypatch.setenv("CHECKMATE_EVENTS", "/srv/events")
    assert find_folder(None) == Path("/srv/events")
    assert find_folder(Path("here")) == Path("here")


def test_a_name_of_a_job_cannot_leave_the_folder() -> None:
    assert file_name("rank 2", "../../etc/x") == ".._.._etc_x.rank-2.jsonl"
    assert file_name("controller", "") == "controller.jsonl"


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EventsError, match=r"events can't be kept in .*/file: it is not a folder"):
        closed_log(tmp_path / "file")
    (tmp_path / "gpt.shadow-node-0.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(EventsError, match="symbolic links"):
        closed_log(tmp_path)


def test_a_service_runs_although_its_folder_of_state_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events").write_text("")
    monkeypatch.delenv("CHECKMATE_EVENTS", raising=False)
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    with open_event_log("controller", "", None) as log:
        assert log.path is None
    assert [text.partition("/events")[2] for text in caplog.messages] == [
        ": it is not a folder; they are kept in memory only"
    ]
    monkeypatch.setenv("CHECKMATE_EVENTS", str(tmp_path / "events"))
    with pytest.raises(EventsError), open_event_log("controller", "", None):
        pass
    monkeypatch.delenv("CHECKMATE_EVENTS")
    with pytest.raises(EventsError), open_event_log("controller", "", tmp_path / "events"):
        pass


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOLCK])
def test_a_disk_that_can_not_be_written_now_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", fail)
        log = EventLog("controller", "", tmp_path)
    assert os.strerror(number) in caplog.messages[0]
    log.start().close()


_HOLD = """
import sys, time
from pathlib import Path
from checkmate.events.event_log import EventLog
log = EventLog("shadow node 0", "gpt", Path(sys.argv[1])).start()
print("kept", flush=True)
time.sleep(60)
"""


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """Have another process keep a log of the same name, and kill it at the end."""
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"kept\n"
            yield
        finally:
            holder.kill()


def test_processes_of_one_name_keep_logs_of_their_own(tmp_path: Path) -> None:
    with keeping(tmp_path), keeping(tmp_path):
        third = closed_log(tmp_path, "disk")
        assert third.path == tmp_path / "gpt.shadow-node-0.3.jsonl"
        assert [event.name for event in third.read().events] == ["node.trouble"]
        assert (tmp_path / "gpt.shadow-node-0.2.jsonl").exists()
    assert closed_log(tmp_path).path == tmp_path / "gpt.shadow-node-0.jsonl", "a dead process keeps none"


def test_more_processes_of_one_name_than_a_folder_takes_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkmate.events.event_log._MAX_NAMESAKES", 1)
    name = "gpt.shadow-node-0.jsonl"
    with keeping(tmp_path), pytest.raises(EventsError, match=f"another process keeps the events of .*{name}"):
        closed_log(tmp_path)


_FULL = """
import logging, resource, sys, time
from pathlib import Path
from checkmate.events.event_log import EventLog
from checkmate.events.kinds import NODE_TROUBLE
logging.basicConfig(format="%(message)s")
log = EventLog("shadow node 0", "gpt", Path(sys.argv[1])).start()
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def keep(first, count):
    for number in range(first, first + count):
        log.keep(NODE_TROUBLE(why="x" * 50), logging.ERROR, str(number))
        time.sleep(0.002)
    time.sleep(0.1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, most))
keep(0, 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
keep(20, 1)
log.close()
print(len(log.read().events))
"""


def test_a_full_disk_stops_nobody_and_is_told_once(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "22\n", "memory has all of them, and the disk how many it lacks"
    assert result.stderr.count("\n") == 1, result.stderr
    assert "gpt.shadow-node-0.jsonl for now: No space left on device; this process goes on" in result.stderr
    log = read_paths([tmp_path])
    whole = [int(event.message) for event in log.events if event.message]
    gaps = [event.fields["count"] for event in log.events if event.name == "events.lost"]
    assert (whole[0], whole[-1]) == (0, 20)
    assert sum(gaps) == 21 - len(whole), "as many as are missing"


def test_how_far_a_process_is_stands_beside_its_events(tmp_path: Path) -> None:
    log = EventLog("shadow node 0", "gpt", tmp_path)
    reached = [0]
    log.beat = lambda: ITERATION_COMMITTED(incarnation=1, iteration=reached[0])
    log.start()
    for iteration in (3, 3, 9):
        reached[0], before = iteration, len(log.read().events)
        log.keep(NODE_TROUBLE(why=""), logging.ERROR, "")
        wait_until(lambda: len(log.read().events) > before, "the event")  # noqa: B023
        time.sleep(0.05)
    log.close()
    committed = [
        event.fields["iteration"]
        for event in read_paths([tmp_path]).events
        if not event.name.startswith("node")
    ]
    assert committed == [3, 9]


def test_whoever_says_something_waits_for_no_disk(tmp_path: Path) -> None:
    log = EventLog("shadow node 0", "gpt", tmp_path)  # its thread does not run: a disk that hangs
    start = time.monotonic()
    for _ in range(20_000):
        log.keep(NODE_TROUBLE(why=""), logging.ERROR, "")
    assert time.monotonic() - start < 5
    assert len(log.read().events) == MAX_RECENT


def test_an_event_is_kept_whatever_the_level_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("rank 0", "gpt")
    keep_in(log)
    try:
        with caplog.at_level(logging.ERROR, "checkmate"):
            say(logging.INFO, NODE_ENDED(), "the %s has ended", "node")
    finally:
        keep_in(None)
    assert caplog.messages == []
    assert [(event.name, event.message, event.level) for event in log.read().events] == [
        ("node.ended", "the node has ended", "info")
    ]


def test_a_line_is_bounded() -> None:
    event = Event(0.5, "rank 0", "node.trouble", "x" * 10_000, {"why": "y" * 10_000, "nodes": [1] * 10_000})
    line = event.to_line()
    assert len(line) < 3000
    assert json.loads(line)["time"] == "1970-01-01T00:00:00.500000Z"
    assert parse_event(line).fields["nodes"] == [1] * 64


def test_a_file_of_something_else_is_not_an_event_log(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Words\n\nMore words.\n")
    with pytest.raises(EventsError, match=r"README.md: not an event log: none of its lines is an event"):
        read_paths([tmp_path / "README.md"])
    (tmp_path / "empty.jsonl").write_text("")
    assert read_paths([tmp_path / "empty.jsonl"]).events == []


def test_files_that_do_not_answer_are_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of a network file system that hangs. What is in memory is read all the same."""
    log = EventLog("node", "demo", tmp_path).start()
    log.keep(NODE_TROUBLE(why="back"), logging.INFO, "back")
    wait_until(lambda: list(tmp_path.glob("*.jsonl")) != [])
    release = threading.Event()
    monkeypatch.setattr(event_log, "_READ_SECONDS", 0.2)
    monkeypatch.setattr(reading, "read_file", lambda *_: release.wait(60))
    for _ in range(3):
        assert [event.message for event in log.read().events] == ["back"]
    assert caplog.text.count("can't be read within 0.2 s") == 3
    assert sum(thread.name == "event files" for thread in threading.enumerate()) == 1
    release.set()
    wait_until(lambda: not any(thread.name == "event files" for thread in threading.enumerate()))
    monkeypatch.undo()
    assert [event.message for event in log.read().events] == ["back"]
    log.close()


def test_a_file_that_was_moved_is_begun_anew_at_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    files = LogFiles(path, 10)
    assert files.write(["123456"]) == 1
    path.rename(tmp_path / "moved")
    assert files.write(["234567", "345678"]) == 2
    assert path.read_text() == "345678\n"
    files.close()


def test_a_folder_that_was_moved_is_made_and_locked_anew(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    files = LogFiles(folder / "a.jsonl", 10)
    files.write(["123456"])
    shutil.rmtree(folder)
    assert files.write(["234567"]) == 1
    assert sorted(os.listdir(folder)) == [".a.jsonl.lock", "a.jsonl"]
    files.close()


@pytest.mark.parametrize("call", ["mkdir", "open", "replace"])
def test_a_disk_that_fails_for_a_while_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "events" / "a.jsonl"
    with caplog.at_level(logging.WARNING, "checkmate"), monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        files = LogFiles(path, 10)
        files.write(["123456"])
        assert files.write(["234567"]) == 0
    assert len(caplog.messages) == 1
    assert files.write(["345678"]) == 1
    assert path.read_text() == "345678\n"
    files.close()


def test_a_lock_that_another_has_taken_meanwhile_stops_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise EventsError("another process keeps the events")

    files = LogFiles(tmp_path / "events" / "a.jsonl", 10)
    files.write(["123456"])
    shutil.rmtree(tmp_path / "events")
    monkeypatch.setattr("checkmate.events.event_log._open_locked", refuse)
    assert files.write(["234567"]) == 0
    files.close()


def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(EventsError, match="it is not a file"):
        read_file(tmp_path / "a.jsonl", ReadEvents())
    with pytest.raises(EventsError, match="it is not a file"):
        LogFiles(tmp_path / "a.jsonl", 10)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "file", "second name"])
def test_roots_log_in_another_users_home_ends_in_no_file_of_roots(tmp_path: Path, kind: str) -> None:
    (roots_folder := tmp_path / "ours").mkdir()
    (roots_folder / "secret").write_text("secret")
    (home := tmp_path / "home").mkdir()
    os.chown(home, NOBODY, NOBODY)
    folder = home / "events"
    if kind == "folder":
        folder.symlink_to(roots_folder)
    else:
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
        if kind == "file":
            (folder / "a.jsonl").symlink_to(roots_folder / "secret")
        else:
            os.link(roots_folder / "secret", folder / "a.jsonl")
    with pytest.raises(EventsError, match="can't be kept"):
        LogFiles(folder / "a.jsonl", 10)
    assert sorted(os.listdir(roots_folder)) == ["secret"]
    assert (roots_folder / "secret").read_text() == "secret"


@needs_root
def test_root_keeps_a_log_in_another_users_folder(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    os.chown(home, NOBODY, NOBODY)
    files = LogFiles(home / "a.jsonl", 10)
    assert files.write(["123456"] * 3) == 3
    files.close()
    assert sorted(os.listdir(home)) == [".a.jsonl.lock", "a.jsonl", "a.jsonl.1"]
