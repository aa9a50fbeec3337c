"""A test run that a time limit ends leaves nothing, neither labs nor processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import terminated
from tests.support.labs.remains import ROOT
from tests.support.waiting import wait_until

_TEST = """
import contextlib, pathlib, time, pytest

@pytest.fixture
def made():
    pathlib.Path("made").touch()
    yield
    pathlib.Path("made").unlink()

@contextlib.contextmanager
def block():
    pathlib.Path("block").touch()
    try:
        yield
    finally:
        pathlib.Path("block").unlink()

def test_that_takes_long(made):
    with block():
        pathlib.Path("begun").touch()
        time.sleep(60)
"""


@pytest.mark.parametrize("workers", [pytest.param("-n0", marks=pytest.mark.slow), "-n1"])
def test_sigterm_removes_what_fixtures_and_blocks_have_made(workers: str, tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(_TEST)
    plugins = ["-p", "xdist", "-p", "tests.support.terminated", "-p", "no:cacheprovider", workers]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--rootdir", tmp_path, *plugins, "test_long.py"],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((tmp_path / "begun").exists, "the test to begin", 60)
        assert (tmp_path / "made").exists()
        assert (tmp_path / "block").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) != 0
        wait_until(lambda: not (tmp_path / "made").exists(), "the fixture to end", 10)
        assert not (tmp_path / "block").exists()
    finally:
        process.kill()
        process.wait()


_CLEANS = """
import pathlib, time
pathlib.Path("made").touch()
try:
    time.sleep(60)
finally:
    time.sleep(0.5)  # longer than `subprocess.run` waits
    pathlib.Path("made").unlink()
"""


def test_a_command_that_takes_too_long_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        terminated.run([sys.executable, "-c", _CLEANS], 2)
    assert list(tmp_path.iterdir()) == []
    assert terminated.run([sys.executable, "-c", "print(3)"], 20).stdout == "3\n"


_STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("as far as it came", flush=True)
pathlib.Path("begun").touch()
time.sleep(60)
"""


def test_an_interrupt_is_not_lost_if_the_command_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else pytest would see a failure, and go on with the next test."""
    monkeypatch.chdir(tmp_path)
    script = """
import sys
from tests.support import terminated
terminated._CLEANING_SECONDS = 0.2
terminated.pytest_configure()
try:
    terminated.run([sys.executable, "-c", sys.argv[1]], 60)
except KeyboardInterrupt as interrupt:
    print("interrupted:", *interrupt.__notes__)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, _STUBBORN],
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until((tmp_path / "begun").exists, "the command to begin", 20)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert output == "interrupted: it did not end within 0 s of the interrupt\n"


def test_the_error_says_what_the_command_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired) as excinfo:
        terminated.run([sys.executable, "-c", f"print('seed 9 fails', flush=True){_CLEANS}"], 2)
    assert "seed 9 fails" in excinfo.value.__notes__[0]


def test_a_test_has_time_left_for_the_command_to_clean_up() -> None:
    assert terminated.time_limit(190).args[0] > 190 + terminated._CLEANING_SECONDS
