"""The PTF suites on each target, and what their runner leaves behind: nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("forwarding", "replication", "streams", "stub")
RUNNER = [sys.executable, "-m", "ptf_tests"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a network namespace")


def _run_suite(target: str, suite: str) -> None:
    command = [*RUNNER, "--target", target, "--suite", suite, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 1), done.stderr
    tests = json.loads(done.stdout)["tests"]
    wrong = [
        f"{test['suite']}.{test['test']}: {test['why']}" for test in tests if test["outcome"] != "passed"
    ]
    assert not wrong, "\n\n".join(wrong)
    assert len(tests) >= 10
    assert {test["suite"] for test in tests} == {suite}


@needs_root
@pytest.mark.parametrize("suite", SUITES)
def test_softswitch(suite: str) -> None:
    _run_suite("softswitch", suite)


@needs_root
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("simple_switch_grpc") is None, reason="simple_switch_grpc isn't on PATH")
@pytest.mark.parametrize("suite", SUITES)
def test_bmv2(suite: str) -> None:
    _run_suite("bmv2", suite)


def test_without_bmv2(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUNNER, "--target", "bmv2"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "needs simple_switch_grpc on PATH" in done.stderr
    assert "Traceback" not in done.stderr


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_leaves_nothing(number: signal.Signals) -> None:
    """Interrupted in mid-run: no switch and no process of its namespace is left."""
    runner = subprocess.Popen(
        [*RUNNER, "--suite", "forwarding"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_until(lambda: len(_in_namespace_of(runner.pid)) > 1)
        namespace = os.stat(f"/proc/{runner.pid}/ns/net").st_ino
        runner.send_signal(number)
        status = runner.wait(timeout=20)
        assert status == {signal.SIGINT: 130, signal.SIGTERM: 130, signal.SIGKILL: -9}[number]
        _wait_until(lambda: not _in_namespace(namespace))
    finally:
        runner.kill()
        runner.wait()


def _in_namespace_of(pid: int) -> list[int]:
    """Processes in the network namespace of `pid`; none while that is still ours."""
    namespace = os.stat(f"/proc/{pid}/ns/net").st_ino
    return [] if namespace == os.stat("/proc/self/ns/net").st_ino else _in_namespace(namespace)


def _in_namespace(namespace: int) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "ns/net").stat().st_ino == namespace:
                found.append(int(process.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # ended meanwhile, or not ours to look at
    return found


def _wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
