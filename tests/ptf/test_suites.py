"""The PTF suites on each target; their runner leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
from rich.console import Console

from ptf_tests.report import Teller
from ptf_tests.stage.targets import tied_to
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("forwarding", "replication", "streams", "stub")
RUNNER = [sys.executable, "-m", "ptf_tests"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a network namespace")


def _run_suite(target: str, suite: str) -> None:
    command = [*RUNNER, "--target", target, "--suite", suite, "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode in (0, 1), result.stderr
    tests = json.loads(result.stdout)["tests"]
    wrong = [
        f"{test['suite']}.{test['test']}: {test['why']}" for test in tests if test["outcome"] != "passed"
    ]
    assert not wrong, "\n\n".join(wrong)
    assert len(tests) >= 10
    assert {test["suite"] for test in tests} == {suite}


@needs_root
@pytest.mark.parametrize("suite", [pytest.param(SUITES[0], marks=pytest.mark.slow), *SUITES[1:]])
def test_softswitch(suite: str) -> None:
    _run_suite("softswitch", suite)


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_tna(suite: str) -> None:
    """The Tofino program's own parsers, controls and deparsers run."""
    _run_suite("tna", suite)


@needs_root
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("simple_switch_grpc") is None, reason="simple_switch_grpc isn't on PATH")
@pytest.mark.parametrize("suite", SUITES)
def test_bmv2(suite: str) -> None:
    _run_suite("bmv2", suite)


def test_without_bmv2(tmp_path: Path) -> None:
    result = subprocess.run(
        [*RUNNER, "--target", "bmv2"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "needs simple_switch_grpc on PATH" in result.stderr
    assert "Traceback" not in result.stderr


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-v"]])
def test_a_suite_is_one_line(options: list[str]) -> None:
    """Passed tests are counted, and only listed with -v."""
    command = [*RUNNER, "--suite", "stub", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout
    *tests, suite, last = result.stdout.splitlines()
    match = re.fullmatch(r"stub +(\d+) passed, 0 failed  \d+\.\d s", suite)
    assert match, result.stdout
    assert last.startswith(f"softswitch: {match[1]} passed, 0 failed in ")
    assert len(tests) == (int(match[1]) if options else 0)
    assert all(line.startswith("  passed ") for line in tests)
    assert result.stderr == ""


class Various(unittest.TestCase):
    """Tests whose results are tested; pytest does not collect them."""

    __test__ = False

    def test_a(self) -> None:
        """this one passes"""

    def test_b(self) -> None:
        """this one fails"""
        self.fail("port [3] got nothing")

    def test_c(self) -> None:
        self.skipTest("no such target")

    def test_d(self) -> None:
        raise ZeroDivisionError


class Unmade(unittest.TestCase):
    """Tests whose set-up fails."""

    __test__ = False

    @classmethod
    def setUpClass(cls) -> None:
        raise OSError("no interface")

    def test_a(self) -> None:
        """never runs"""


def test_whatever_did_not_pass_is_told_with_the_reason() -> None:
    file = io.StringIO()
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    teller = Teller(Console(file=file, soft_wrap=True), Console(file=io.StringIO()))
    rows = teller.suite("mixed", unittest.TestSuite([load(Various), load(Unmade)]))
    text = file.getvalue()
    assert re.match(r"mixed        1 passed, 3 failed, 1 skipped  \d\.\d s\n", text)
    assert "this one passes" not in text
    for words in (
        "this one fails (Various.test_b)\n      port [3] got nothing\n",
        "  skipped  0.00 s  Various.test_c\n      no such target\n",
        "ZeroDivisionError",
        "setUpClass",
        "OSError: no interface",
    ):
        assert words in text
    outcomes = {row.test.rpartition(".")[2]: row.outcome for row in rows[:4]}
    assert outcomes == {"test_a": "passed", "test_b": "failed", "test_c": "skipped", "test_d": "failed"}
    assert {row.suite for row in rows} == {"mixed"}


def test_a_switch_whose_runner_has_died_at_once_does_not_run() -> None:
    command = [sys.executable, "-c", "print('running')"]
    dead_parent = subprocess.Popen(["true"])
    dead_parent.wait()
    for parent, output in ((os.getpid(), "running\n"), (dead_parent.pid, "")):
        result = subprocess.run([*tied_to(parent), *command], capture_output=True, text=True, check=False)
        assert result.stdout == output


@needs_root
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_leaves_nothing(number: signal.Signals) -> None:
    """After an interrupted run, no switch and no process of its namespace is left."""
    runner = subprocess.Popen(
        [*RUNNER, "--suite", "forwarding"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: len(_in_namespace_of(runner.pid)) > 1)
        namespace = os.stat(f"/proc/{runner.pid}/ns/net").st_ino
        runner.send_signal(number)
        status = runner.wait(timeout=20)
        assert status == {signal.SIGINT: 130, signal.SIGTERM: 130, signal.SIGKILL: -9}[number]
        wait_until(lambda: not _in_namespace(namespace))
    finally:
        runner.kill()
        runner.wait()


def _in_namespace_of(pid: int) -> list[int]:
    """Return the processes in the network namespace of `pid`; none while it is still ours."""
    namespace = os.stat(f"/proc/{pid}/ns/net").st_ino
    return [] if namespace == os.stat("/proc/self/ns/net").st_ino else _in_namespace(namespace)


def _in_namespace(namespace: int) -> list[int]:
    pids = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "ns/net").stat().st_ino == namespace:
                pids.append(int(process.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or is not readable
    return pids
