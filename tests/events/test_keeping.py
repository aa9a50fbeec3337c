"""Event logs on disk: bounded, private, whole after a crash, and no burden on the process."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from checkmate.cli.common import kept_events
from checkmate.events import keeping
from checkmate.events.event import Event
from checkmate.events.keeping import MEMORY, EventLog, file_name, folder_of
from checkmate.events.kinds import ITERATION_COMMITTED, NODE_ENDED, NODE_TROUBLE
from checkmate.events.line import event_of
from checkmate.events.reading import EventsError, read_paths
from checkmate.events.saying import keep_in, say
from tests.support.waiting import wait_until


def names(folder: Path) -> list[str]:
    return [event.name for event in read_paths([folder]).events]


def kept(folder: Path | None, *troubles: str, file_bytes: int = 4 << 20) -> EventLog:
    """Return a log, which is closed, after these events."""
    log = EventLog("shadow node 0", "gpt", folder, file_bytes=file_bytes).start()
    for why in troubles:
        log.keep(NODE_TROUBLE(why=why), logging.ERROR, why)
    log.close()
    return log


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    log = kept(tmp_path / "events", "a \N{SNOWMAN}", "b\nc")
    assert log.path == tmp_path / "events" / "gpt.shadow-node-0.jsonl"
    found = read_paths([tmp_path / "events"])
    assert found.passed_over == {}
    assert [(one.name, one.message, one.fields, one.level) for one in found.events] == [
        ("node.trouble", "a \N{SNOWMAN}", {"why": "a \N{SNOWMAN}"}, "error"),
        ("node.trouble", "b\nc", {"why": "b\nc"}, "error"),
    ]
    first = found.events[0]
    assert (first.source, first.job, first.pid) == ("shadow node 0", "gpt", os.getpid())
    assert abs(first.time - time.time()) < 60
    assert log.read().events == found.events, "what is on disk and in memory is the same event"


def test_others_can_not_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    log = kept(folder, "a")
    assert log.path is not None
    assert (folder.stat().st_mode & 0o777, log.path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_log_goes_on_where_a_killed_process_has_stopped_within_a_line(tmp_path: Path) -> None:
    log = kept(tmp_path, "a", "b")
    assert log.path is not None
    data = log.path.read_bytes()
    log.path.write_bytes(data[:-20])
    kept(tmp_path, "c")
    found = read_paths([tmp_path])
    assert [one.message for one in found.events] == ["a", "c"]
    assert found.passed_over == {str(log.path): 1}


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
    log = kept(tmp_path, "a")
    assert log.path is not None
    log.path.write_bytes(line + b"\n" + log.path.read_bytes())
    found = read_paths([log.path])
    assert [one.message for one in found.events] == ["a"]
    assert found.passed_over[str(log.path)] >= 1


def test_two_files_of_a_size_are_kept(tmp_path: Path) -> None:
    log = EventLog("shadow node 0", "gpt", tmp_path, file_bytes=20_000).start()
    for number in range(400):
        log.keep(NODE_TROUBLE(why=f"{number}"), logging.ERROR, f"{number}")
    log.close()
    assert log.path is not None
    older = log.path.with_name(log.path.name + ".1")
    assert sorted(tmp_path.glob("gpt*")) == [log.path, older]
    assert all(10_000 < file.stat().st_size <= 20_000 for file in (log.path, older))
    found = [int(one.message) for one in read_paths([tmp_path]).events]
    assert found == list(range(found[0], 400)), "the newest, in order, and none twice"
    assert [int(one.message) for one in log.read().events] == list(range(400)), "memory has more"


def test_memory_is_bounded_and_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHECKMATE_EVENTS", raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert folder_of(None) is None
    log = kept(None, *map(str, range(MEMORY + 5)))
    assert [one.message for one in log.read().events] == [str(n) for n in range(5, MEMORY + 5)]


def test_the_folder_is_the_option_else_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/checkmate:/var/lib/other")
    monkeypatch.delenv("CHECKMATE_EVENTS", raising=False)
    assert folder_of(None) == Path("/var/lib/checkmate/events")
    monkeypatch.setenv("CHECKMATE_EVENTS", "/srv/events")
    assert folder_of(None) == Path("/srv/events")
    assert folder_of(Path("here")) == Path("here")


def test_a_name_of_a_job_cannot_leave_the_folder() -> None:
    assert file_name("rank 2", "../../etc/x") == ".._.._etc_x.rank-2.jsonl"
    assert file_name("controller", "") == "controller.jsonl"


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EventsError, match=r"events can't be kept in .*/file: it is not a folder"):
        kept(tmp_path / "file")
    (tmp_path / "gpt.shadow-node-0.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(EventsError, match="symbolic links"):
        kept(tmp_path)


def test_a_service_runs_although_its_folder_of_state_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events").write_text("")
    monkeypatch.delenv("CHECKMATE_EVENTS", raising=False)
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    with kept_events("controller", "", None) as log:
        assert log.path is None
    assert [one.partition("/events")[2] for one in caplog.messages] == [
        ": it is not a folder; they are kept in memory only"
    ]
    monkeypatch.setenv("CHECKMATE_EVENTS", str(tmp_path / "events"))
    with pytest.raises(EventsError), kept_events("controller", "", None):
        pass
    monkeypatch.delenv("CHECKMATE_EVENTS")
    with pytest.raises(EventsError), kept_events("controller", "", tmp_path / "events"):
        pass


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOLCK])
def test_a_disk_that_can_not_be_written_now_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", fails)
        log = EventLog("controller", "", tmp_path)
    assert os.strerror(number) in caplog.messages[0]
    log.start().close()


_HOLD = """
import sys, time
from pathlib import Path
from checkmate.events.keeping import EventLog
log = EventLog("shadow node 0", "gpt", Path(sys.argv[1])).start()
print("kept", flush=True)
time.sleep(60)
"""


def test_two_processes_do_not_keep_one_log(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"kept\n"
        with pytest.raises(
            EventsError, match="another process keeps the events of .*gpt.shadow-node-0.jsonl"
        ):
            kept(tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait()
    kept(tmp_path, "a")
    assert names(tmp_path) == ["node.trouble"]


_FULL = """
import logging, resource, sys, time
from pathlib import Path
from checkmate.events.keeping import EventLog
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
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "22\n", "memory has all of them, and the disk how many it lacks"
    assert done.stderr.count("\n") == 1, done.stderr
    assert "gpt.shadow-node-0.jsonl for now: No space left on device; this process goes on" in done.stderr
    found = read_paths([tmp_path])
    whole = [int(one.message) for one in found.events if one.message]
    lost = [one.fields["count"] for one in found.events if one.name == "events.lost"]
    assert (whole[0], whole[-1]) == (0, 20)
    assert sum(lost) == 21 - len(whole), "as many as are missing"


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
        one.fields["iteration"] for one in read_paths([tmp_path]).events if not one.name.startswith("node")
    ]
    assert committed == [3, 9]


def test_whoever_says_something_waits_for_no_disk(tmp_path: Path) -> None:
    log = EventLog("shadow node 0", "gpt", tmp_path)  # its thread does not run: a disk that hangs
    start = time.monotonic()
    for _ in range(20_000):
        log.keep(NODE_TROUBLE(why=""), logging.ERROR, "")
    assert time.monotonic() - start < 5
    assert len(log.read().events) == MEMORY


def test_an_event_is_kept_whatever_the_level_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("rank 0", "gpt")
    keep_in(log)
    try:
        with caplog.at_level(logging.ERROR, "checkmate"):
            say(logging.INFO, NODE_ENDED(), "the %s has ended", "node")
    finally:
        keep_in(None)
    assert caplog.messages == []
    assert [(one.name, one.message, one.level) for one in log.read().events] == [
        ("node.ended", "the node has ended", "info")
    ]


def test_a_line_is_bounded() -> None:
    event = Event(0.5, "rank 0", "node.trouble", "x" * 10_000, {"why": "y" * 10_000, "nodes": [1] * 10_000})
    line = event.to_line()
    assert len(line) < 3000
    assert json.loads(line)["time"] == "1970-01-01T00:00:00.500000Z"
    assert event_of(line).fields["nodes"] == [1] * 64


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
    answered = threading.Event()
    monkeypatch.setattr(keeping, "_READ_SECONDS", 0.2)
    monkeypatch.setattr(keeping, "read_file", lambda *_: answered.wait(60))
    for _ in range(3):
        assert [event.message for event in log.read().events] == ["back"]
    assert caplog.text.count("can't be read within 0.2 s") == 3
    assert sum(thread.name == "event files" for thread in threading.enumerate()) == 1
    answered.set()
    wait_until(lambda: not any(thread.name == "event files" for thread in threading.enumerate()))
    monkeypatch.undo()
    assert [event.message for event in log.read().events] == ["back"]
    log.close()
