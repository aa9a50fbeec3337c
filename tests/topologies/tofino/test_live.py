"""Labs whose switch is a Tofino's model: streams, training, restarts, and removal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.labs.live import alive, needs_clang, needs_root
from tests.support.labs.remains import LAB_COMMAND, remains
from tests.support.training import faulty
from tests.support.waiting import wait_until
from topologies.crew import Crew, LabController, serving
from topologies.describe.topology import load
from topologies.lab import Lab
from topologies.tofino_model import DRIVERS, MODEL
from topologies.traffic.orders import Load
from topologies.traffic.run import Traffic
from topologies.training.orders import Kill

pytestmark = [
    needs_root,
    needs_clang,
    pytest.mark.skipif(
        shutil.which(MODEL) is None or shutil.which(DRIVERS) is None,
        reason=f"{MODEL} and {DRIVERS} are not on PATH",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture
def lab(name: str) -> Iterator[Lab]:
    with Lab(load("single_tor"), "tofino", name=name) as tofino_lab:
        yield tofino_lab


def test_streams_are_complete(lab: Lab) -> None:
    """The controller restarts while they run; later the switch does, and is loaded again."""
    restarted = False
    with Crew(lab) as crew, serving(crew) as controller:
        run = Traffic(crew, Load(400_000, iterations=8, pause=0.3))

        def tick(nbytes: int) -> None:
            nonlocal restarted
            if not restarted and nbytes > run.copies // 10:
                restarted = True
                controller.restart()

        assert run.run(tick).good
        assert restarted
        lab.restart_switch("tor")
        outcome = Traffic(crew, Load(100_000, iterations=2, incarnation=2)).run()
    assert outcome.good, outcome.data()
    assert outcome.verdict.tagged >= 100_000


def test_training_is_that_of_an_undisturbed_run(name: str, tmp_path: Path) -> None:
    """The controller restarts, a rank is killed with -9, and the program is loaded again."""
    kill = Kill(2, 12, "all-gather", bucket=0)
    with faulty.job(name, tmp_path, kill, gated=True, target="tofino", shape=faulty.TINY) as run:
        run.train(6)
        run.controller.restart()
        run.train(16)
        run.controller.kill()
        LabController(run.crew, ("--no-view", "--load", run.lab.job_file))
        at = 16
        while not all(run.live(node) and run.stepped(node) >= at - 2 for node in (0, 1)) or at < 20:
            at += 1
            assert at < faulty.ITERATIONS - 2, [run.training.status(node) for node in (0, 1)]
            run.train(at)
            run.pause(1.2)
        outcome = faulty.check(run, repeated=1)
    (recovery,) = outcome.record.recoveries()
    assert (recovery.rank, recovery.iteration) == (2, 12)
    assert recovery.resumed_with >= 11


def test_a_signal_leaves_nothing(name: str) -> None:
    before = set(os.listdir("/sys/class/net"))
    process = subprocess.Popen([*LAB_COMMAND, "up", "single_tor", "--target", "tofino", "--name", name])
    wait_until(lambda: len(remains(name, before).processes) == 3)
    lab_remains = remains(name, before)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not remains(name, before)
    assert not alive(lab_remains.processes)
