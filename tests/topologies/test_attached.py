"""Commands for a lab that is up: exec, logs, train."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import COMMAND
from tests.support.labs.live import alive, needs_clang, needs_root
from tests.support.labs.remains import LAB_COMMAND, ROOT, lab_command
from tests.support.waiting import wait_until
from topologies.crew import Crew
from topologies.describe.topology import load
from topologies.kernel import namespaces
from topologies.lab import Lab

pytestmark = needs_root


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(load("single_tor"), name=f"a{os.getpid()}_{random.randrange(10**6)}") as attached_lab:
        yield attached_lab


@contextlib.contextmanager
def lab_process(*arguments: str, folder: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start `checkmate lab` in any folder; kill it at the end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"}
    process = subprocess.Popen(
        [*LAB_COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder or "/",
        env=environment,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Return the match in the first line of its output that has one."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no {pattern!r} in {''.join(lines)}")


def test_a_command_runs_on_a_node(lab: Lab) -> None:
    code = (
        "import os, socket; print([name for _, name in socket.if_nameindex()]); "
        "print(*(os.environ[name] for name in ('CHECKMATE_JOB', 'GLOO_SOCKET_IFNAME', 'PATH'))); exit(7)"
    )
    result = lab_command("exec", lab.name, "rank2", "--", "python", "-c", code)
    assert result.returncode == 7, result.stderr
    interfaces, environment = result.stdout.splitlines()
    assert interfaces == "['lo', 'mgmt0', 'data0']"
    job, gloo, path = environment.split(maxsplit=2)
    assert (job, gloo) == (str(lab.job_file), "mgmt0")
    assert path.startswith(f"{Path(sys.executable).parent}:")
    for node, inside in (("tor", "port8"), ("ctl", "172.31.0.1/16")):
        assert inside in lab_command("exec", lab.name, node, "ip", "-br", "address").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (
            ("exec", "LAB", "rnak2", "true"),
            2,
            "); did you mean rank2?",
        ),
        (("logs", "LAB", "shadow7"), 2, "has no node 'shadow7' (its nodes are ctl, "),
        (
            ("exec", "LABx", "rank2", "true"),
            2,
            "); did you mean LAB?",
        ),
        (("train", "LABx"), 2, "no lab 'LABx' is up (labs that are up: "),
        (("logs", "NO"), 2, "'NO' is not a valid lab name"),
        (("exec", "LAB", "rank2", "no-such-command"), 127, "'no-such-command' is neither an executable file"),
    ],
)
def test_what_does_not_exist_is_one_message(
    lab: Lab, arguments: tuple[str, ...], status: int, words: str
) -> None:
    result = lab_command(*(argument.replace("LAB", lab.name) for argument in arguments))
    assert result.returncode == status
    assert words.replace("LAB", lab.name) in result.stderr
    assert "Traceback" not in result.stderr


def test_what_happened_in_a_lab_is_kept_and_reported(lab: Lab) -> None:
    node = ["checkmate", "shadow", str(lab.job_file), "--id", "0"]
    with lab_process("exec", lab.name, "shadow0", "--", *node) as process:
        until(process, "^ready: ")
        log = lab.directory / "events" / f"{lab.name}.shadow-node-0.jsonl"
        wait_until(lambda: log.exists() and "node.started" in log.read_text(), "the event to be written")
        process.send_signal(signal.SIGKILL)
    inside = lab_command("exec", lab.name, "ctl", "--", "checkmate", "report")
    assert inside.returncode == 0, inside.stderr
    assert "Who ended without saying so" in inside.stdout
    assert re.search("shadow node 0, process [0-9]+ on ", inside.stdout)
    hint = f"outside lab {lab.name}, use checkmate lab exec {lab.name} ctl -- checkmate"
    for command in ("report", "status"):
        outside = subprocess.run(
            [*COMMAND, command, str(lab.job_file)], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert (outside.returncode == 0) == (command == "report"), outside
        assert f"{hint} {command}" in " ".join((outside.stdout + outside.stderr).split())
        assert hint not in inside.stdout


def test_a_command_gets_the_signals_itself_and_ends_with_the_lab(lab: Lab) -> None:
    with lab_process("exec", lab.name, "rank0", "--", "sh", "-c", "echo up; exec sleep 60") as process:
        until(process, "up")
        assert process.pid in namespaces.processes([lab.namespace("rank0")])
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT


def test_logs_of_one_node_of_all_and_as_they_come(lab: Lab) -> None:
    with Crew(lab) as crew:
        crew.run("shadow0", "shadow0", ["sh", "-c", "echo said; printf 'a\\rcomplained' >&2"], 20)
        log = lab_command("logs", lab.name, "shadow0")
        assert sorted(log.stdout.splitlines()) == ["complained", "said"]
        all_lines = lab_command("logs", lab.name).stdout.splitlines()
        assert "shadow0 | said" in all_lines
        assert any(line.startswith("tor     | softswitch: P4Runtime on") for line in all_lines)
        with lab_process("logs", lab.name, "shadow0", "--follow") as process:
            until(process, "^said$")
            crew.run("shadow0", "shadow0", ["echo", "more"], 20)
            until(process, "^more$")
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130


@pytest.mark.slow
def test_logs_follow_until_the_lab_is_removed(name: str) -> None:
    lab = Lab(load("single_tor"), name=name)
    lab.up()
    lab.release()
    with lab_process("logs", name, "--follow") as process:
        until(process, "P4Runtime on")
        assert lab_command("down", name).returncode == 0
        assert process.wait(10) == 0


@needs_clang
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_resumes_after_a_kill_with_a_controller_that_serves_already(
    lab: Lab, tmp_path: Path
) -> None:
    lab.release()
    script = ("-m", "checkmate.examples.gpt.train", "--iterations", "25", "--layers", "1", "--width", "64")
    with ExitStack() as stack:
        command = ("exec", lab.name, "ctl", "--", "checkmate", "run", str(lab.job_file))
        controller = stack.enter_context(lab_process(*command))
        until(controller, "^serving; stop with Ctrl-C")
        process = stack.enter_context(
            lab_process("train", lab.name, "--", *script, "--heads", "2", folder=tmp_path)
        )
        worker = int(until(process, r"kill -9 (\d+), training resumes")[1])
        until(process, "^iteration 8: loss")
        os.kill(worker, signal.SIGKILL)
        resumed = int(until(process, r"resumed from the shadow nodes: iteration (\d+) comes next")[1])
        assert resumed >= 8
        assert until(process, r"^iteration (\d+): loss")[1] == str(resumed)
        until(process, "^iteration 24: loss")
        assert process.wait(60) == 0
        assert controller.poll() is None
        assert not list(tmp_path.iterdir())
    assert "live at iteration" in lab_command("logs", lab.name, "shadow1").stdout


@needs_clang
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_with_any_script_fails_or_is_interrupted(lab: Lab, tmp_path: Path) -> None:
    lab.release()
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('waits', flush=True)\ntime.sleep(60)\n")
    before = namespaces.processes(namespaces.of_lab(lab.name))
    with lab_process("train", lab.name, "--", "script.py", folder=tmp_path) as process:
        until(process, "^waits$")
        busy = lab_command("down", lab.name)
        assert (busy.returncode, f"in use by process {process.pid}" in busy.stderr) == (1, True)
        running = set(namespaces.processes(namespaces.of_lab(lab.name))) - set(before)
        assert len(running) >= 11  # a controller, two shadow nodes, four times torchrun and the script
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert not alive(running)
    with lab_process("train", lab.name, "--", "script.py", folder=tmp_path) as process:
        until(process, "^waits$")
        process.kill()  # its processes go on
    with (
        lab_process("exec", lab.name, "rank1", "--", "sh", "-c", "echo up; exec sleep 300") as users,
        lab_process("train", lab.name, "--", "script.py", folder=tmp_path) as process,
    ):
        until(users, "^up$")
        until(process, "^waits$")
        assert users.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert set(namespaces.processes(namespaces.of_lab(lab.name))) <= {*before, users.pid}
    script.write_text("raise ValueError('the cat sleeps')\n")
    with lab_process("train", lab.name, "--max-restarts", "0", "--", "script.py", folder=tmp_path) as process:
        until(process, "^error: rank0, rank1, rank2, rank3 failed with: ValueError: the cat sleeps$")
        assert process.wait(30) == 1
    with lab_process("train", lab.name, "--", "script.py", folder=tmp_path) as process:
        until(
            process,
            "^error: the script has failed twice in the same way: ValueError: the cat sleeps; rank0, ",
        )
        assert process.wait(30) == 1
    script.write_text(
        "import os, time, checkmate\nprint('waits', flush=True)\ntime.sleep(5)\n"
        "if os.environ['RANK'] == '2':\n    raise checkmate.RefusedError('no cats')\ntime.sleep(60)\n"
    )
    with lab_process("train", lab.name, "--max-restarts", "0", "--", "script.py", folder=tmp_path) as process:
        until(process, "^rank 2: RefusedError: no cats$")
        until(process, "^error: rank2 failed with: checkmate.training.errors.RefusedError: no cats$")
        assert process.wait(30) == 1


@needs_clang
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_up_prints_works_in_any_folder_by_hand(name: str, tmp_path: Path) -> None:
    """With an environment whose path has a space."""
    environment, folder = tmp_path / "an environment", tmp_path / "a folder"
    environment.symlink_to(sys.prefix)
    folder.mkdir()
    here: dict[str, Any] = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    entry = [str(environment / "bin" / "python"), "-m", "checkmate.cli.entry"]
    up = subprocess.run(
        [*entry, "lab", "up", "single_tor", "--name", name], capture_output=True, check=True, **here
    )
    lines = [line.strip() for line in up.stdout.partition("or by hand")[2].splitlines()[1:]]
    assert lines[0].startswith(f"'{environment}/bin/")
    controller, *shadows, loop, kill, status, consolidate, _remove, _shell, down = lines
    log = folder / "log"

    def start(command: str) -> None:
        with log.open("a") as file:
            subprocess.Popen(
                ["bash", "-c", command], stdout=file, stderr=file, start_new_session=True, **here
            )

    def wait_for_words(words: str, count: int = 1) -> None:
        wait_until(lambda: log.read_text().count(words) >= count, words, 100)

    for command in (controller, *shadows):
        start(command)
    wait_for_words("ready: shadow node", len(shadows))
    start(loop)
    wait_for_words("iteration 8: loss")
    subprocess.run(["bash", "-c", kill], check=True, **here)
    wait_for_words("resumed from the shadow nodes: iteration")
    for command in (status, consolidate):
        subprocess.run(["bash", "-c", command], check=True, capture_output=True, **here)
    assert any((folder / "checkpoint").iterdir())
    subprocess.run(["bash", "-c", down], check=True, capture_output=True, **here)
    assert not namespaces.of_lab(name)


_PATCHED = """
import sys
from pathlib import Path
from topologies import state
state.RUN = Path(sys.argv.pop(1))
from checkmate.cli.entry import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "answer", "labs_left"),
    [((), b"n\n", ["one", "two"]), ((), b"y\n", []), (("--yes",), b"", [])],
)
def test_on_a_terminal_down_lists_all_labs_and_asks(
    tmp_path: Path, arguments: tuple[str, ...], answer: bytes, labs_left: list[str]
) -> None:
    """In a folder of labs of its own, because other labs of this machine are not the test's."""
    for name in ("one", "two"):
        (tmp_path / "labs" / name).mkdir(parents=True)
    control, terminal = pty.openpty()
    command = [sys.executable, "-c", _PATCHED, str(tmp_path / "labs"), "lab", "down", "--all", *arguments]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=os.environ | {"TERM": "xterm"}
    )
    os.close(terminal)
    os.write(control, answer)
    output = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(control, 4096):
            output += piece
    os.close(control)
    assert process.wait(30) == bool(labs_left)
    assert (b"Remove 2 labs" in output) == (not arguments)
    assert sorted(path.name for path in tmp_path.glob("labs/*")) == labs_left
    assert b"two" in output


def test_down_does_not_ask_on_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "labs" / "one").mkdir(parents=True)
    command = [sys.executable, "-c", _PATCHED, str(tmp_path / "labs"), "lab", "down", "--all"]
    result = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "lab one removed\n"), result.stderr
    assert not (tmp_path / "labs").exists()
