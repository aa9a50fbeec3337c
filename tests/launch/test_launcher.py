"""`checkmate launch`, with scripts that train nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from checkmate.launch.spare import imports_of
from testbed.ports import free_port
from tests.support.waiting import wait_until

WORDS = """
    import os, sys, time
    from pathlib import Path
    pipe = int(os.environ["CHECKMATE_LAUNCHER_PIPE"])
    rank = int(os.environ["RANK"])
    here = Path(__file__).parent
    with (here / f"{rank}.pids").open("a") as file:
        print(os.getpid(), os.getppid(), file=file, flush=True)
    def say(word):
        os.write(pipe, f"{word}\\n".encode())
    def wait():
        while not (here / "end").exists():
            time.sleep(0.02)
"""


class LaunchedScript:
    """A script that `checkmate launch` runs on two ranks."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.file = folder / "script.py"
        self.file.write_text(textwrap.dedent(WORDS) + textwrap.dedent(script))
        nodes = [{"id": 0, "mgmt": f"127.0.0.1:{free_port()}"}]
        job = {"job": "mine", "copies": "host", "ranks": 2, "shadow_nodes": nodes}
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start it."""
        command = [
            sys.executable,
            "-m",
            "checkmate.cli.entry",
            "launch",
            "--job",
            str(self.folder / "job.yaml"),
        ]
        self.process = subprocess.Popen(
            [*command, *options, "--", str(self.file)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "500"},
        )
        return self.process

    def processes(self, rank: int) -> list[int]:
        """Return the numbers of a rank's processes, the first one first."""
        file = self.folder / f"{rank}.pids"
        return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []

    def has(self, rank: int, count: int) -> bool:
        """Return whether a rank has had as many processes."""
        return len(self.processes(rank)) == count

    def finish(self, status: int) -> str:
        """Have the ranks end; return what the launcher has written, once it has ended with a status."""
        (self.folder / "end").touch()
        assert self.process is not None
        _, errors = self.process.communicate(timeout=30)
        assert self.process.returncode == status, errors
        return errors


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list[LaunchedScript]]:
    scripts: list[LaunchedScript] = []
    yield scripts
    for script in scripts:
        if script.process is not None and script.process.poll() is None:
            script.process.kill()
            script.process.communicate()
        for rank in range(2):
            for pid in script.processes(rank):
                wait_until(lambda pid=pid: not runs(pid), "ranks to end with their launcher")  # type: ignore[misc]


def runs(pid: int) -> bool:
    """Return whether a process runs, and is not only left for its parent to collect."""
    try:
        return " Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:2]
    except FileNotFoundError:
        return False


def script_of(launched: list[LaunchedScript], folder: Path, text: str) -> LaunchedScript:
    launched.append(LaunchedScript(folder, text))
    return launched[-1]


def test_a_dead_rank_is_started_alone(launched: list[LaunchedScript], tmp_path: Path) -> None:
    script = script_of(launched, tmp_path, "say('met')\nwait()\n")
    script.start()
    wait_until(lambda: script.has(0, 1) and script.has(1, 1), "ranks")
    os.kill(script.processes(1)[0], signal.SIGKILL)
    wait_until(lambda: script.has(1, 2), "another process")
    errors = script.finish(0)
    assert errors.count("rank 1 was killed by SIGKILL, and is started again") == 1
    assert script.has(0, 1)


def test_a_spare_takes_a_dead_ranks_place(launched: list[LaunchedScript], tmp_path: Path) -> None:
    """The process in its place has the script's imports before it begins, and is the launcher's own child."""
    text = """
        import torch
        from checkmate.launch import spare
        (here / f"{rank}.forked").write_text(str("checkmate.launch.spare" == spare.__spec__.name
            and sys.modules.get("checkmate.training.in_place.resilient") is not None))
        assert sys.argv == [__file__]
        say("met")
        wait()
        sys.exit(0)
    """
    script = script_of(launched, tmp_path, text)
    launcher = script.start("--spare")
    wait_until(lambda: (tmp_path / "0.forked").exists() and (tmp_path / "1.forked").exists(), "ranks", 60)
    assert (tmp_path / "1.forked").read_text() == "False", "a rank's first process imports by itself"

    def killed() -> bool:
        """Kill rank 1 until a spare is ready."""
        count = len(script.processes(1))
        os.kill(script.processes(1)[-1], signal.SIGKILL)
        (tmp_path / "1.forked").unlink(missing_ok=True)
        wait_until(lambda: script.has(1, count + 1) and (tmp_path / "1.forked").exists(), "a process", 60)
        return (tmp_path / "1.forked").read_text() == "True"

    wait_until(killed, "a process that was forked", 60)
    last = (tmp_path / "1.pids").read_text().splitlines()[-1].split()
    assert int(last[1]) == launcher.pid
    script.finish(0)
    assert script.has(0, 1)


def test_a_rank_that_is_stopped_is_killed(launched: list[LaunchedScript], tmp_path: Path) -> None:
    text = """
        say("met")
        while not (here / "end").exists():
            say("alive")
            time.sleep(0.05)
    """
    script = script_of(launched, tmp_path, text)
    script.start("--patience", "2")
    wait_until(lambda: script.has(0, 1) and script.has(1, 1), "ranks")
    os.kill(script.processes(0)[0], signal.SIGSTOP)
    wait_until(lambda: script.has(0, 2), "another process")
    assert "rank 0 (process" in script.finish(0)
    assert script.has(1, 1)


def test_a_script_that_always_fails_ends_all_ranks(launched: list[LaunchedScript], tmp_path: Path) -> None:
    script = script_of(launched, tmp_path, "if rank == 1:\n    sys.exit(3)\nwait()\n")
    launcher = script.start()
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "rank 1 has ended with status 3, as 3 in a row did before they had met" in errors
    assert len(script.processes(1)) == 3


def test_a_rank_that_dies_after_the_training_is_not_started_again(
    launched: list[LaunchedScript], tmp_path: Path
) -> None:
    """It would wait for the others, which have ended; they finish what they do."""
    script = script_of(
        launched,
        tmp_path,
        "say('met')\nsay('concluded')\nif rank == 0:\n    os.kill(os.getpid(), 9)\nwait()\n",
    )
    launcher = script.start()
    wait_until(lambda: script.has(0, 1) and not runs(script.processes(0)[0]), "rank 0 to die")
    assert launcher.poll() is None, "rank 1 still saves its model"
    errors = script.finish(1)
    assert "rank 0 was killed by SIGKILL after all ranks were done" in errors
    assert "is started again" not in errors
    assert script.has(0, 1)


def test_a_final_word_ends_all_ranks_at_once(launched: list[LaunchedScript], tmp_path: Path) -> None:
    script = script_of(
        launched, tmp_path, "say('met')\nif rank == 0:\n    say('final')\n    sys.exit(1)\nwait()\n"
    )
    launcher = script.start()
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "can't go on" in errors
    assert script.has(0, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(
    launched: list[LaunchedScript], tmp_path: Path, number: signal.Signals
) -> None:
    script = script_of(launched, tmp_path, "wait()\n")
    launcher = script.start("--spare")
    wait_until(lambda: script.has(0, 1) and script.has(1, 1), "ranks")
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert "Traceback" not in errors.replace(
        'Traceback (most recent call last):\n  File "' + str(script.file), ""
    )


def test_a_launcher_that_is_killed_leaves_nothing(launched: list[LaunchedScript], tmp_path: Path) -> None:
    script = script_of(launched, tmp_path, "wait()\n")
    launcher = script.start("--spare")
    wait_until(lambda: script.has(0, 1) and script.has(1, 1), "ranks")
    launcher.kill()
    launcher.communicate(timeout=30)
    wait_until(lambda: not any(runs(pid) for rank in range(2) for pid in script.processes(rank)), "their end")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "3"], "2 ranks of job mine can't be shared out evenly to 3 hosts"),
        (["--nnodes", "2", "--node-rank", "2"], "this host's number is 2 of 2"),
        (["--nproc-per-node", "3"], "1 hosts with 3 ranks each are 3 ranks, but job mine has 2"),
    ],
)
def test_options_that_contradict_the_job_are_one_line(
    launched: list[LaunchedScript], tmp_path: Path, options: list[str], words: str
) -> None:
    launcher = script_of(launched, tmp_path, "").start(*options)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 2
    assert words in errors
    assert len(errors.strip().splitlines()) == 1


def test_imports_are_found_also_within_functions() -> None:
    source = "import a, b.c\nfrom d import e\nfrom . import f\n"
    source += "def g():\n    from torch.distributed.fsdp import x\n"
    names = [*imports_of(source)]
    assert names == ["a", "b.c", "d", "torch.distributed.fsdp", "checkmate.training.model.fsdp"]
    assert not [*imports_of("this is no Python")]
