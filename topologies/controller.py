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
    """Run a `checkmate` command beside the controller to its end; return its output."""
    return crew.run("checkmate", CONTROLLER, [*CHECKMATE, *arguments], _START_SECONDS)


def status(crew: Crew) -> list[dict[str, Any]]:
    """Return each switch's status of the lab's job, by `checkmate status --json`."""
    return list(json.loads(checkmate(crew, "status", "--json", crew.lab.job_file)).values())


def await_streams(crew: Crew, seconds: float = _CONNECT_SECONDS) -> None:
    """Wait until all streams of the lab's job are connected; raise `LabError` on timeout."""
    checkmate(crew, "status", "--wait", "--timeout", f"{seconds:g}", crew.lab.job_file)


class LabController:
    """A `checkmate run` process in a lab, from its start until `stop`."""

    def __init__(
        self, crew: Crew, arguments: Collection[str | Path] = (), cpus: Collection[int] | None = None
    ) -> None:
        """Set the arguments of `checkmate run`; the default is the lab's job."""
        self.crew = crew
        argv = [*CHECKMATE, "run", *(arguments or ("--no-view", crew.lab.job_file))]
        self.member: Member = crew.start("controller", CONTROLLER, argv, cpus=cpus)
        self._await_serving()

    def kill(self) -> None:
        """Kill it with SIGKILL; this does not count as a failure."""
        self.crew.kill(self.member)

    def restart(self) -> None:
        """Kill it if it runs, start it again, and wait until it serves."""
        self.crew.restart(self.member)
        self._await_serving()

    def stop(self) -> None:
        """Stop it as Ctrl-C does, unless it was killed."""
        if self.member in self.crew:
            self.crew.stop(self.member, seconds=20)

    def _await_serving(self) -> None:
        self.crew.wait(lambda: "serving" in self.member.said(), "controller to serve", _START_SECONDS)


@contextlib.contextmanager
def serving(
    crew: Crew, *arguments: str | Path, cpus: Collection[int] | None = None
) -> Iterator[LabController]:
    """Run `checkmate run` until the block ends, on the lab's job or with these arguments."""
    controller = LabController(crew, arguments, cpus)
    try:
        yield controller
    except BaseException:
        controller.kill()  # report the original error, not the controller's end
        raise
    controller.stop()
