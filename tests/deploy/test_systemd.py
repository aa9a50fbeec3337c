"""The units for systemd: they are valid, and processes tell systemd what the units expect."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkmate.base.systemd import notify, watchdog_seconds
from checkmate.events.reading import read_paths
from checkmate.keys.access import INSECURE
from checkmate.shadow.process import Serving
from checkmate.shadow.view import follow
from testbed.copies import local_job
from tests.support.switch_process import job_on, softswitch

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


class Manager:
    """The socket of a service manager."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.settimeout(20)
        self._sock.bind(path.replace("@", "\0", 1))

    def await_message(self, word: str) -> str:
        """Return the first message from now on that has a word."""
        while word not in (text := self._sock.recv(4096).decode()):
            pass
        return text

    def close(self) -> None:
        self._sock.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    service_manager = Manager(
        str(tmp_path / "notify") if request.param == "path" else f"@checkmate-test-{os.getpid()}"
    )
    yield service_manager
    service_manager.close()


def test_a_controller_tells_when_it_serves_and_that_it_is_alive(manager: Manager, tmp_path: Path) -> None:
    with softswitch("--no-p4") as switch:
        job = str(job_on(switch, tmp_path))
        command = [
            sys.executable,
            "-m",
            "checkmate.cli.entry",
            "run",
            "--standby",
            job,
            *("--log-format", "json"),
        ]
        settings = {
            "NOTIFY_SOCKET": manager.path,
            "WATCHDOG_USEC": "300000",
            "STATE_DIRECTORY": str(tmp_path),
        }
        environment = {**os.environ, INSECURE: "1", **settings}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert manager.await_message("READY=1") == "READY=1\nSTATUS=standing by"
            assert manager.await_message("READY=1") == "READY=1\nSTATUS=serving"
            began = time.monotonic()
            for _ in range(3):
                manager.await_message("WATCHDOG=1")
            assert time.monotonic() - began < 3
            process.terminate()  # once: a second signal would end it at once
            assert manager.await_message("STOPPING=1")
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    logged = [event.name for event in read_paths([tmp_path / "events"]).events]
    assert logged == [line["event"] for line in lines if "event" in line]
    words = ("started", "standby", "claims", "primary", "ended")
    assert logged == [f"controller.{word}" for word in words]


@pytest.mark.skipif(os.geteuid() != 0, reason="receive buffers need CAP_NET_ADMIN")
def test_a_shadow_node_is_alive_as_long_as_its_lock_can_be_had(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.path)
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setattr("checkmate.shadow.view.SECONDS", 0.05)
    monkeypatch.setenv(INSECURE, "1")
    with Serving(local_job(), 0) as serving:
        stopped = threading.Event()
        follower = threading.Thread(
            target=follow, args=(serving.node, stopped, None), kwargs={"as_json": False}
        )
        follower.start()
        manager.await_message("WATCHDOG=1")
        with serving.node.state_changed:
            manager._sock.settimeout(0.5)
            with pytest.raises(TimeoutError):
                for _ in range(100):  # those that were sent before
                    manager.await_message("WATCHDOG=1")
        manager.await_message("WATCHDOG=1")
        stopped.set()
        follower.join()


def test_without_a_manager_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in ("", str(tmp_path / "gone"), "relative", "@gone"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1")
    for period, process in (("", ""), ("nonsense", ""), ("1000000", "1")):
        monkeypatch.setenv("WATCHDOG_USEC", period)
        monkeypatch.setenv("WATCHDOG_PID", process)
        assert watchdog_seconds() is None
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_seconds() == 1.0


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_that_there_is(unit: Path) -> None:
    (line,) = re.findall(r"^ExecStart=\S+ (.*)$", unit.read_text(), re.MULTILINE)
    name, *words = line.split()
    command = [sys.executable, "-m", "checkmate.cli.entry", name, "--help"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"}
    )
    options = {word for word in words if word.startswith("--")}
    assert options and all(option in result.stdout for option in options)


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze (systemd) is not on PATH"
)
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
    (tmp_path / unit.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and not result.stderr, result.stderr
