"""Training in a lab that is up: a controller if none serves, shadow nodes, and torchrun with any script.

`checkmate lab train` is this.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from topologies import state
from topologies.crew import TEMPORARY, Crew, Member, controlled
from topologies.describe.topology import CONTROLLER, SHADOW_MGMT_PORT, BadDescription, LabError, LabHost
from topologies.kernel import namespaces
from topologies.kernel.namespaces import entered
from topologies.kernel.processes import has_variable, kill_all
from topologies.lab import Lab
from topologies.logs import LabLogs, LogLine
from topologies.progress import StepProgress
from topologies.torchrun import Starter
from topologies.training.job_processes import JobProcesses, rank_process
from topologies.training.notices import Notices

_END_SECONDS: Final = 10.0
_OF_TORCHRUN: Final = re.compile(r"\[rank\d+\]:|[WE]\d{4} .*torch/distributed/elastic")
"""The prefix of a script's traceback, and of torchrun's own log."""
_FOLLOWED: Final = re.compile(r", from iteration \d+ on$")
"""The end of the line in which rank 0 reports that shadow nodes follow."""
_SILENCE_SECONDS: Final = 30.0
"""After which a script that writes, but has not called Checkmate, is named."""
_LOOK_SECONDS: Final = 1.0
"""From one look at the switches to the next."""


class LabTraining:
    """A training that runs in a lab."""

    def __init__(self, job: JobProcesses) -> None:
        self._job = job
        self._lab = job.crew.lab
        names = [host.name for host in self._lab.topology.trainers]
        self._first = names[0]
        self._logs = LabLogs(self._lab.directory, names)
        self._notices = Notices()
        self._announced = 0
        """The process that was told last."""
        self._dead: frozenset[str] = frozenset()
        """Switches that do not run."""
        self._looked = 0.0
        self._silent_since = time.monotonic()

    def follow(
        self, show: Callable[[LogLine], None], tell: Callable[[str], None], alarm: Callable[[str], None]
    ) -> None:
        """Train to the end, and say so; raise `LabError` if training fails.

        Args:
            show: Called with each line that rank 0 writes, except for tracebacks, which restarts cause.
            tell: Called with the process number of the last rank's script, once shadow nodes follow, and with
                the end.
            alarm: Called with each error that a rank's script ends with, as soon as it is written, and not
                again for all ranks, without those that the death of another rank causes. Also with the death
                of a rank or a switch, and if the script does not call Checkmate.
        """

        def tick() -> None:
            if self._show(show, alarm, whole=True):
                name, member = list(self._job.ranks.items())[-1]
                rank_name = name if name.startswith("rank") else f"a rank on {name}"
                if (worker := rank_process(member)) is not None:
                    if worker != self._announced:  # rank 0's host may follow several DP groups
                        tell(f"{rank_name} is process {worker}; after kill -9 {worker}, training resumes")
                    self._announced = worker
            if self._notices.repeated:
                raise LabError(f"the script has failed twice in the same way: {self._notices.repeated}")
            self._look(alarm)

        try:
            self._job.finish(math.inf, tick)
        finally:
            self._show(show, alarm, whole=False)
        if not self._notices.has_checkmates_lines:
            alarm(
                "the script has ended, and no rank has logged a line of Checkmate's: did it call "
                "checkmate.protect?"
            )
        tell(f"training has ended; the lab stays, until `checkmate lab down {self._lab.name}`")

    def await_output(self) -> None:
        """Wait until rank 0 has written something."""
        first, *_ = self._job.ranks.values()
        with self._job.explained():
            self._job.crew.wait(lambda: _wrote(first), "rank 0 to begin", math.inf)

    def _look(self, alarm: Callable[[str], None]) -> None:
        """Look at what no rank writes about: switches that do not run, and a script without Checkmate."""
        now = time.monotonic()
        if not self._notices.has_checkmates_lines and now > self._silent_since + _SILENCE_SECONDS:
            self._silent_since = math.inf
            alarm(
                f"no line of Checkmate's in {_SILENCE_SECONDS:g} s: does the script call checkmate.restore "
                "and checkmate.protect, and show its log? Without them, nothing protects it"
            )
        if now < self._looked + _LOOK_SECONDS:
            return
        self._looked = now
        dead = frozenset(self._lab.dead_switches())
        for name in sorted(dead - self._dead):
            alarm(
                f"switch {name} does not run, so no packet passes it: see "
                f"`checkmate lab logs {self._lab.name} {name}`"
            )
        for name in sorted(self._dead - dead):
            alarm(f"switch {name} runs again")
        self._dead = dead

    def _show(self, show: Callable[[LogLine], None], alarm: Callable[[str], None], *, whole: bool) -> bool:
        """Show new lines. Return whether shadow nodes have begun to follow, and no rank has failed since."""
        followed = False
        for line in self._logs.new(whole=whole):
            notice = self._notices.of(line)
            if notice:
                followed = False
                alarm(notice)
            if line.node != self._first or notice is not None:
                continue
            if not (line.error and _OF_TORCHRUN.match(line.text)):
                show(line)
            followed |= bool(_FOLLOWED.search(line.text))
        return followed


@contextlib.contextmanager
def training_in(
    name: str, script: Sequence[str] | None, *, restarts: int, console: Console, in_place: bool = False
) -> Iterator[LabTraining]:
    """Start a script on all ranks of a lab, which is locked meanwhile; at the end everything is stopped.

    Args:
        name: The lab.
        script: The script and its arguments, as for torchrun; the topology's own by default.
        restarts: The number of restarts after deaths of ranks.
        console: Where the steps are shown.
        in_place: Whether a rank that dies is started alone, so that the others keep their processes.
    """
    state.require_root()
    lab = Lab.attached(name)
    if not script and lab.topology.script and in_place:
        script = [*lab.topology.script, "--in-place"]
    if not (script := script or lab.topology.script):
        raise BadDescription(
            f"none of Checkmate's examples trains the DP groups of lab {name}: name a script, as in "
            f"`checkmate lab train {name} -- train.py`"
        )
    if not script[0].startswith("-") and not Path(script[0]).is_file():
        raise BadDescription(f"{script[0]} does not exist; name a script, or a module with -m")
    with state.locked(name), Crew(lab) as crew, contextlib.ExitStack() as stack:
        with StepProgress(console) as steps:
            steps("processes of an earlier training")
            _end_remains(lab)
            if lab.switches:
                steps("controller")
            stack.enter_context(controlled(crew, unless_served=True))
            steps("shadow nodes")
            job = JobProcesses(crew)
            job.start_shadow_nodes(without=[h for h in lab.topology.shadow_nodes if _serves(lab, h)])
            starter: Starter = "launch --spare" if in_place else "torchrun"
            program = "checkmate launch" if in_place else starter
            steps(f"{program} starts {len(lab.topology.ranks)} ranks")
            job.start_ranks(script, restarts=restarts, starter=starter)
            training = LabTraining(job)
            training.await_output()
        yield training
        job.stop()


def _wrote(member: Member) -> bool:
    return not member.running or bool(member.output_text() or member.error_text())


def _end_remains(lab: Lab) -> None:
    """End what a `lab train` that was killed has left, but nothing that a user has started in the lab."""
    names, temporary = namespaces.of_lab(lab.name), str(lab.directory / TEMPORARY)

    def remains() -> list[int]:
        return [
            process for process in namespaces.processes(names) if has_variable(process, "TMPDIR", temporary)
        ]

    kill_all(remains, _END_SECONDS)


def _serves(lab: Lab, host: LabHost) -> bool:
    """Return whether a shadow node runs on a host already."""
    with entered(lab.namespace(CONTROLLER)), socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((str(host.mgmt), SHADOW_MGMT_PORT)) == 0
