"""Things fail while real traffic runs, and still no shadow stream misses or changes a byte."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from topologies import lab as labs
from topologies import namespaces
from topologies.crew import Member
from topologies.describe import CONTROLLER, load
from topologies.lab import Lab
from topologies.runner import CHECKMATE, Traffic
from topologies.steps import Steps
from topologies.traffic import Load

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang"),
    pytest.mark.timeout(240),
]

# As a service manager would: the controller is started again whenever it ends.
_SUPERVISED = 'trap "kill -INT $p; exit 0" INT TERM; while :; do "$@" & p=$!; wait $p; done'
_NBYTES = 200_000_000


class Upset(Traffic):
    """A run in which `upset` happens once a tenth of the bytes are read."""

    def __init__(self, lab: Lab, load: Load, steps: Steps, upset: Callable[[Lab], None]) -> None:
        super().__init__(lab, load, steps)
        self._upset = upset
        self.happened = False

    def _serve(self) -> Member:
        command: list[str | Path] = [
            "/bin/sh",
            "-c",
            _SUPERVISED,
            "sh",
            *CHECKMATE,
            "run",
            "--no-view",
            self._lab.job_file,
        ]
        controller = self._crew.start("controller", CONTROLLER, command)
        self._crew.wait(lambda: "serving" in controller.output.read_text(), "controller to serve", 60)
        return controller

    def _watch(self, shadows: Sequence[Member]) -> Callable[[], None]:
        look = super()._watch(shadows)

        def tick() -> None:
            look()
            if not self.happened and _received(shadows) > self._copies // 10:
                self.happened = True
                self._upset(self._lab)

        return tick


def _received(shadows: Sequence[Member]) -> int:
    lines = [line for m in shadows for line in m.output.read_text().splitlines()[-1:]]
    return sum(int(line.split()[1]) for line in lines if line.startswith("received "))


def _controllers(lab: Lab) -> list[int]:
    """The controller's own processes, not the shell that starts them again."""
    found = []
    for pid in namespaces.processes([lab.namespace(CONTROLLER)]):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
        if b"run" in arguments and b"-c" not in arguments:
            found.append(pid)
    return found


def kill_controller(lab: Lab) -> None:
    (pid,) = _controllers(lab)
    os.kill(pid, signal.SIGKILL)


def restart_switch(lab: Lab) -> None:
    (process,) = lab._switch_processes.values()
    process.kill()
    process.wait()
    time.sleep(0.3)
    lab._start_switch(lab.switches[0])


@pytest.fixture
def lab() -> Iterator[Lab]:
    name = f"u{os.getpid()}_{random.randrange(10**6)}"
    with Lab(load("single_tor"), "softswitch", name=name) as made:
        yield made
    labs.down(name)


@pytest.mark.parametrize("upset", [kill_controller, restart_switch])
def test_every_stream_is_complete(lab: Lab, upset: Callable[[Lab], None]) -> None:
    with Steps(Console(file=io.StringIO())) as steps:
        run = Upset(lab, Load(_NBYTES, iterations=8), steps, upset)
        outcome = run.run()
    assert run.happened
    assert outcome.good, outcome.data()
    assert outcome.verdict.tagged >= _NBYTES
