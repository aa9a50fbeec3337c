"""Failures under traffic: no shadow stream misses or changes a byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.labs.live import needs_bmv2, needs_clang, needs_root
from tests.support.labs.made import on_one_switch
from topologies.crew import Crew, LabController, checkmate, serving
from topologies.describe.job_files import Target
from topologies.describe.topology import build
from topologies.lab import Lab
from topologies.traffic.orders import Load
from topologies.traffic.run import Traffic

pytestmark = [needs_root, needs_clang, pytest.mark.timeout(240)]

_NBYTES = 200_000_000
_TOPOLOGY = on_one_switch(2, (2, 2), channels=2)


def restart_controller(controller: LabController) -> None:
    controller.restart()


def restart_switch(controller: LabController) -> None:
    lab = controller.crew.lab
    lab.stop_switch("tor")
    time.sleep(0.3)
    lab.restart_switch("tor")


def load_program(controller: LabController) -> None:
    """Stop the controller, and start one that loads the program again, as for an upgrade."""
    crew = controller.crew
    controller.stop()
    checkmate(crew, "run", "--load", "--once", crew.lab.job_file)
    controller.restart()


@pytest.fixture
def lab(target: Target, name: str) -> Iterator[Lab]:
    with Lab(build("pair", _TOPOLOGY), target, name=name) as pair:
        yield pair


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "upset"),
    [
        ("softswitch", restart_controller),
        ("softswitch", restart_switch),
        ("softswitch", load_program),
        pytest.param("bmv2", restart_controller, marks=needs_bmv2),
        pytest.param("bmv2", load_program, marks=needs_bmv2),
    ],
)
def test_every_stream_is_complete(lab: Lab, upset: Callable[[LabController], None]) -> None:
    """The failure happens after a tenth of the bytes has been read."""
    happened = False
    with Crew(lab) as crew, serving(crew) as controller:
        # Pauses prevent that the last byte is sent before a tenth of the copies is read.
        run = Traffic(crew, Load(_NBYTES, iterations=8, pause=0.3))

        def tick(nbytes: int) -> None:
            nonlocal happened
            if not happened and nbytes > run.copies // 10:
                happened = True
                upset(controller)

        outcome = run.run(tick)
    assert happened
    assert outcome.good, outcome.data()
    assert outcome.verdict.tagged >= _NBYTES
