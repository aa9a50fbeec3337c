"""The controller in a lab.

with Lab(load("single_tor")) as lab, Crew(lab) as crew, serving(crew) as controller:
    ...
    controller.kill()
    controller.restart()
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from topologies.crew import Crew, Member
from topologies.describe.topology import CONTROLLER

CHECKMATE: Final = (sys.executable, "-m", "checkmate.cli.entry")
_START_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 30.0


def checkmate(crew: Crew, *arguments: str | Path) -> str:
    """Run a `checkmate` command beside the controller to its end; its output."""
    return crew.run("checkmate", CONTROLLER, [*CHECKMATE, *arguments], _START_SECONDS)


def status(crew: Crew) -> list[dict[str, Any]]:
    """What each switch says of the lab's job, by `checkmate status --json`."""
    return list(json.loads(checkmate(crew, "status", "--json", crew.lab.job_file)).values())


def await_streams(crew: Crew, seconds: float = _CONNECT_SECONDS) -> None:
    """Wait until all streams of the lab's job are connected; `LabError` where they aren't in time."""
    checkmate(crew, "status", "--wait", "--timeout", f"{seconds:g}", crew.lab.job_file)


class LabController:
    """A `checkmate run` in a lab, from its start until `stop`."""

    def __init__(
        self, crew: Crew, arguments: Collection[str | Path] = (), cpus: Collection[int] | None = None
    ) -> None:
        """`arguments` of `checkmate run`; by default the lab's job."""
        self.crew = crew
        argv = [*CHECKMATE, "run", *(arguments or ("--no-view", crew.lab.job_file))]
        self.member: Member = crew.start("controller", CONTROLLER, argv, cpus=cpus)
        self._await_serving()

    def kill(self) -> None:
        """Kill it with SIGKILL. That is no failure."""
        self.crew.kill(self.member)

    def restart(self) -> None:
        """Start it again, kill it first where it runs, and wait until it serves."""
        self.crew.restart(self.member)
        self._await_serving()

    def stop(self) -> None:
        """End it as Ctrl-C does, unless it was killed."""
        if self.member in self.crew:
            self.crew.stop(self.member, seconds=20)

    def _await_serving(self) -> None:
        self.crew.wait(lambda: "serving" in self.member.said(), "controller to serve", _START_SECONDS)


@contextlib.contextmanager
def serving(
    crew: Crew, *arguments: str | Path, cpus: Collection[int] | None = None
) -> Iterator[LabController]:
    """`checkmate run` on the lab's job, or with these arguments; it serves until the block ends."""
    controller = LabController(crew, arguments, cpus)
    try:
        yield controller
    except BaseException:
        controller.kill()  # what went wrong is told, not how it ends
        raise
    controller.stop()
