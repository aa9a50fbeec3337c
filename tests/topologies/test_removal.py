"""Errors, signals or kill -9 while a lab is created or used leave nothing of it behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.labs.live import alive, needs_root
from tests.support.labs.remains import LAB_COMMAND, ROOT, any_target, lab_command, remains
from tests.support.waiting import wait_until
from topologies import state
from topologies.describe.topology import load
from topologies.kernel import namespaces
from topologies.lab import Lab

pytestmark = needs_root


def test_an_error_inside_removes_the_lab(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_TERM_SECONDS", 0.5)
    before = set(os.listdir("/sys/class/net"))
    with pytest.raises(ZeroDivisionError), Lab(load("single_tor"), any_target(), name=name) as lab:
        deaf = "trap '' TERM; echo ready; while :; do /bin/true; done"  # it continuously starts others
        stubborn = lab.start("rank0", ["sh", "-c", deaf], stdout=subprocess.PIPE)
        assert stubborn.stdout is not None
        with stubborn.stdout as output:
            assert output.readline() == b"ready\n"
        raise ZeroDivisionError
    assert stubborn.wait() == -signal.SIGKILL
    assert not remains(name, before)


@pytest.mark.parametrize(
    ("number", "namespaces_made"),
    [
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        (signal.SIGINT, 9),
        pytest.param(signal.SIGINT, 17, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 9, marks=pytest.mark.slow),
        (signal.SIGTERM, 17),
    ],
)
def test_a_signal_half_way_leaves_nothing(name: str, number: signal.Signals, namespaces_made: int) -> None:
    before = set(os.listdir("/sys/class/net"))
    process = _start_up(name)
    wait_until(lambda: len(namespaces.of_lab(name)) >= namespaces_made or process.poll() is not None)
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 128 + number, words
    assert "Traceback" not in words
    assert not remains(name, before)


_SIGNAL_AFTER_FORK = """
import os, signal, sys
from checkmate.cli.entry import main

number, forks = int(sys.argv.pop()), 0


def after() -> None:
    global forks
    forks += 1
    if forks == 9:
        signal.raise_signal(number)


os.register_at_fork(after_in_parent=after)
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_right_after_a_fork_is_not_lost(name: str, number: signal.Signals) -> None:
    """Python ignores exceptions in hooks after a fork, and creating a namespace forks."""
    before = set(os.listdir("/sys/class/net"))
    arguments = ["lab", "up", "paper_testbed", "--name", name, "--target", any_target(), str(int(number))]
    result = subprocess.run(
        [sys.executable, "-c", _SIGNAL_AFTER_FORK, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 128 + number, result.stderr
    assert "Exception ignored" not in result.stderr
    assert not remains(name, before)


@pytest.mark.parametrize(
    "namespaces_made",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(9, marks=pytest.mark.slow),
        17,
    ],
)
def test_down_clears_up_after_kill_9(name: str, namespaces_made: int) -> None:
    before = set(os.listdir("/sys/class/net"))
    process = _start_up(name)
    wait_until(lambda: state.folder(name).exists() and len(namespaces.of_lab(name)) >= namespaces_made)
    process.kill()
    process.communicate(timeout=60)
    lab_remains = remains(name, before)
    assert lab_remains
    assert name in [lab["name"] for lab in json.loads(lab_command("list", "--json").stdout)["labs"]]
    assert lab_command("down", name).returncode == 0
    assert not remains(name, before)
    assert not alive(lab_remains.processes)


def _start_up(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LAB_COMMAND, "up", "paper_testbed", "--name", name, "--target", any_target()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
