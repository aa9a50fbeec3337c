"""Live views and logs at a terminal: each log line is whole, once, and above the view."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from checkmate.job.validation import data_of
from testbed.copies import Copies, local_job
from testbed.ports import free_port
from testbed.small_training import SmallTraining, status
from tests.cli.test_switch import write_job
from tests.support.cli import COMMAND
from tests.support.labs.end_hosts import needs_buffers
from tests.support.terminal import AtTerminal
from tests.support.waiting import wait_until

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@contextmanager
def switch(port: int) -> Iterator[None]:
    """Run an empty switch on a port; kill it at the end."""
    command = [sys.executable, "-m", "softswitch", "--no-p4", "--device-id", "1", "--cpu-port", "510"]
    command += ["--grpc-server-addr", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and b"P4Runtime" in process.stdout.readline()
            yield
        finally:
            process.kill()


def log_lines(lines: list[str]) -> list[str]:
    """Return each log line, put together from its rows: the further ones begin below the message."""
    log: list[str] = []
    open_ = False
    for line in lines:
        if re.match(TIME, line):
            log.append(line)
            open_ = True
        elif open_ and line.startswith(" " * 20):
            log[-1] += f" {line.strip()}"
        else:
            open_ = False
    return log


def has(terminal: AtTerminal, words: str, times: int) -> bool:
    """Return whether some words are at the terminal so often, however they are wrapped."""
    return terminal.words.count(words) == times


def wait_for_words(terminal: AtTerminal, words: str, times: int) -> None:
    """Wait until some words are at the terminal so often; a failure shows the whole terminal."""
    try:
        wait_until(partial(has, terminal, words, times), f"{words!r} {times} times")
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *terminal.lines])) from None


def below(lines: list[str], title: str) -> list[str]:
    """Check that a view is there once, and return it."""
    (first,) = [number for number, line in enumerate(lines) if title in line]
    return lines[first:]


@pytest.mark.parametrize(("columns", "heads"), [pytest.param(60, 2, marks=pytest.mark.slow), (80, 1)])
def test_restarts_of_a_switch_leave_log_and_view_whole(tmp_path: Path, columns: int, heads: int) -> None:
    """At 60 columns, each of the two streams has its own heads."""
    port = free_port()
    file = write_job(tmp_path, f"127.0.0.1:{port}")
    restarts = 2
    with ExitStack() as stack:
        up = stack.enter_context(ExitStack())
        up.enter_context(switch(port))
        terminal = stack.enter_context(AtTerminal([*COMMAND, "run", str(file)], columns=columns))
        wait_until(lambda: "copies lost" in terminal.words, "the view")
        for number in range(1, restarts + 1):
            up.close()
            wait_for_words(terminal, "trying again", number)
            up.enter_context(switch(port))
            wait_for_words(terminal, "is back: ", number)
            time.sleep(2.5)  # the view is drawn again, and again
        assert terminal.end() == 0
        lines = terminal.lines
    messages = [line for line in log_lines(lines) if "without keys" not in line]
    assert len(messages) == 2 * restarts, messages
    for loss, back in zip(messages[::2], messages[1::2], strict=True):
        assert re.fullmatch(rf"{TIME} .*switch tor0.*; trying again until it is back", loss), loss
        assert re.fullmatch(rf"{TIME} switch tor0 is back: \d+ updates written", back), back
    view = below(lines, "switch tor0: copies lost: ")
    assert below(view, "switch tor0 (softswitch), job demo")
    assert not re.search(TIME, "\n".join(view))
    assert sum("NIC" in line for line in lines) == sum("NIC" in line for line in view) == heads
    assert has(terminal, "copies lost", 1)


@pytest.mark.slow
@needs_buffers
def test_restarts_of_training_leave_log_and_view_whole(tmp_path: Path) -> None:
    job = local_job(nodes=1)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data_of(job, exclude_none=True)))
    restarts = 3
    with ExitStack() as stack:
        terminal = stack.enter_context(AtTerminal([*COMMAND, "shadow", str(file), "--id", "0"], columns=80))
        wait_until(lambda: "waiting for training" in terminal.words, "the view")
        assert "shard" not in terminal.words
        copies = Copies(job)
        stack.callback(copies.close)
        for number in range(restarts):
            training = SmallTraining(job, copies)
            training.incarnation = number
            training.begin([0], run=f"run {number}", generation=number)
            training.seed_all()
            wait_until(lambda: status(job, 0).holds[0].live, "live")
            assert "iteration -1" not in terminal.words
            training.iterate()
            wait_until(lambda: status(job, 0).holds[0].stepped == 0, "stepped")
            time.sleep(1.5)
            training.close()
        assert terminal.end() == 0
        lines = terminal.lines
    messages = [line[20:] for line in log_lines(lines) if "without keys" not in line]
    for number in range(restarts):
        assert messages.count(f"DP group 0: incarnation {number} begins at iteration 0") == 1, messages
    assert messages.count("DP group 0, shard 0: live before iteration 0") == restarts, messages
    view = below(lines, f"shadow node 0, job {job.job}")
    assert sum("received" in line for line in lines) == 1
    assert not re.search(TIME, "\n".join(view))
