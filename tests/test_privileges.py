"""Long-running processes keep the least capabilities, in all threads (docs/security.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from checkmate.base.privileges import Capability, Owner, owner_of, to_listen, to_read, to_write
from testbed.copies import local_job
from testbed.jobs import job_data
from tests.support.capabilities import check_keeps
from tests.support.cli import COMMAND
from tests.support.shadow.processes import NodeProcess
from tests.support.switch_process import softswitch

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which has capabilities to give up")


def python(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(["from checkmate.base.privileges import *", *lines])]


@needs_root
def test_what_is_kept_works_and_nothing_else_even_in_children() -> None:
    script = python(
        "import socket, subprocess, sys",
        "keep_only(Capability.NET_ADMIN)",
        "socket.socket().setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE",
        "try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "except PermissionError: print('refused', flush=True)",
        "subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])",
    )
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "refused\n"
        assert process.stdout.readline() == "1\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        check_keeps(process.pid, Capability.NET_ADMIN)
        check_keeps(int(child), Capability.NET_ADMIN)
        process.stdin.write("\n")


def test_nothing_is_given_up_while_threads_run() -> None:
    script = python(
        "import threading",
        "before, end = effective(), threading.Event()",
        "threading.Thread(target=end.wait).start()",
        "try: keep_only()",
        "except PrivilegesError as error: print(error, effective() == before)",
        "end.set()",
    )
    result = subprocess.run(script, capture_output=True, text=True, check=True)
    assert result.stdout == "2 threads are running: capabilities must be given up before they start True\n"


def test_without_any_capability_there_is_nothing_to_give_up() -> None:
    script = python("keep_only()", "keep_only(Capability.NET_ADMIN)", "print(sorted(effective()))")
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout == "[]\n"


@needs_root
def test_files_of_another_user_take_a_capability(tmp_path: Path) -> None:
    (own_folder := tmp_path / "own").mkdir()
    (foreign_folder := tmp_path / "theirs").mkdir()
    os.chown(foreign_folder, NOBODY, NOBODY)
    below = foreign_folder / "folder" / "file"
    assert to_write(own_folder) == ()
    assert to_write(below) == (Capability.DAC_OVERRIDE, Capability.FOWNER)
    assert to_read([own_folder, below]) == (Capability.DAC_READ_SEARCH,)
    (own_folder / "link").symlink_to(foreign_folder / "file")
    assert to_read([own_folder / "link"]) == (Capability.DAC_READ_SEARCH,)
    assert to_listen([1024, 50051]) == ()
    assert to_listen([50051, 443]) == (Capability.NET_BIND_SERVICE,)


@needs_root
@pytest.mark.parametrize(
    "is_foreign",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["files of root", "files of another user"],
)
def test_a_shadow_node_keeps_what_its_buffers_need(
    start: Callable[..., NodeProcess], tmp_path: Path, is_foreign: bool
) -> None:
    if is_foreign:
        os.chown(tmp_path, NOBODY, NOBODY)
        tmp_path.chmod(0o700)
    job = local_job(nodes=1)
    node = start(job, 0, "--no-view")
    assert node.line().startswith("ready")
    check_keeps(node.process.pid, Capability.NET_ADMIN, *to_read([tmp_path / "job.yaml"]))
    assert is_foreign <= (Capability.DAC_READ_SEARCH in to_read([tmp_path / "job.yaml"]))


@needs_root
@pytest.mark.slow
def test_root_keeps_events_in_the_folder_of_another_user(
    start: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, NOBODY, NOBODY)
    node = start(local_job(nodes=1), 0, "--no-view", "--events", str(home / "events"))
    assert node.line().startswith("ready")
    capabilities = [*to_read([tmp_path / "job.yaml"]), *to_write(home)]
    check_keeps(node.process.pid, Capability.NET_ADMIN, *capabilities)
    assert list((home / "events").glob("*.jsonl"))


@needs_root
def test_the_controller_keeps_none_but_for_its_events(tmp_path: Path) -> None:
    with softswitch("--no-p4") as tor:
        data = job_data()
        data["fabric"]["switches"][0]["address"] = tor.address
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(data))
        (home := tmp_path / "home").mkdir(mode=0o700)
        os.chown(home, NOBODY, NOBODY)
        events = home / "events"
        for options, capabilities in ((), ()), (("--events", str(events)), to_write(events)):
            command = [*COMMAND, "run", "--no-view", str(file), *options]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout
                assert "written" in process.stdout.readline()
                assert process.stdout.readline().startswith("serving")
                check_keeps(process.pid, *to_read([file]), *capabilities)
                process.terminate()
        assert list(events.glob("*.jsonl"))


@needs_root
def test_roots_checkpoints_in_another_users_folder_are_that_users(
    tmp_path: Path, start: Callable[..., NodeProcess]
) -> None:
    """Its owner could lead what root writes there to any file of root's."""
    start(local_job(nodes=1), 0, "--no-view").line()
    (home := tmp_path / "home").mkdir()
    os.chown(home, NOBODY, NOBODY)
    tmp_path.chmod(0o755)
    folder = home / "kept"
    command = [*COMMAND, "consolidate", str(tmp_path / "job.yaml"), "--out", str(folder), "--every", "1"]
    command += ["--timeout", "0.5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while "waiting" not in process.stderr.readline():
            assert process.poll() is None
        check_keeps(process.pid, bounding=(*to_read([]), Capability.SETUID, Capability.SETGID))
        status = Path(f"/proc/{process.pid}/status").read_text()
        for name in ("Uid", "Gid"):
            (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
            assert line.split()[1:] == [str(NOBODY)] * 4
        assert "Groups:\t \n" in status
        process.terminate()


@needs_root
def test_whoever_can_change_a_path_is_its_owner(tmp_path: Path) -> None:
    (inner := tmp_path / "theirs" / "ours").mkdir(parents=True)
    assert owner_of(inner) is None
    os.chown(inner.parent, NOBODY, NOBODY)
    assert owner_of(inner) == owner_of(inner / "not" / "there") == Owner(NOBODY, NOBODY)
    (tmp_path / "link").symlink_to(inner)
    assert owner_of(tmp_path / "link" / "x") == Owner(NOBODY, NOBODY)


@pytest.mark.slow
@needs_root
def test_a_reader_of_checkpoints_keeps_none(tmp_path: Path, start: Callable[..., NodeProcess]) -> None:
    start(local_job(nodes=1), 0, "--no-view").line()
    file = tmp_path / "job.yaml"
    command = [*COMMAND, "consolidate", str(file), "--out", str(tmp_path / "kept"), "--every", "1"]
    command += ["--timeout", "0.5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while "waiting" not in process.stderr.readline():
            assert process.poll() is None
        check_keeps(process.pid, *to_read([file]))
        process.terminate()
