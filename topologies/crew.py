"""Processes in a lab that are watched together, the controller among them.

If one fails, the run ends with an error that quotes it.

with Crew(lab) as crew:
    node = crew.start("shadow0", "shadow0", ["checkmate", "shadow", ...], cpus={1})
    crew.kill(node)
    crew.restart(node)
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from controlplane.errors import AnotherPrimary
from topologies.describe.topology import CONTROLLER, LabError
from topologies.kernel import processes
from topologies.kernel.processes import PYTHON
from topologies.lab import Lab

_POLL_SECONDS: Final = 0.05
_AFTERMATH_SECONDS: Final = 1.0
_QUOTED: Final = 4

TEMPORARY: Final = "tmp"
"""Below a lab's directory."""


@dataclass(eq=False)
class Member:
    """A process, how to launch it again, and the files with its standard output and standard error."""

    name: str
    output: Path
    errors: Path
    launch: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]
    good: Collection[int] = (0,)
    """Exit statuses that are not a failure."""
    _output_from: int = 0
    _errors_from: int = 0

    @property
    def running(self) -> bool:
        """Whether it is still running."""
        return self.process.poll() is None

    def output_text(self) -> str:
        """Return its standard output since it was last started."""
        return _text(self.output, self._output_from)

    def error_text(self) -> str:
        """Return its standard error since it was last started."""
        return _text(self.errors, self._errors_from)

    def children(self) -> list[int]:
        """Return its descendants, such as a `torchrun`'s workers."""
        return processes.descendants(self.process.pid)

    def obituary(self) -> str:
        """Return an error message for its failure."""
        return f"{self.name} ended with status {self.process.returncode}: {self.last_words()}"

    def last_words(self) -> str:
        """Return the end of its standard error, or of its output, for an error message."""
        return processes.last_lines(self.error_text() or self.output_text())

    def wrote_at(self) -> int:
        """Return the time of its last write, in ns."""
        has_errors = self.errors.stat().st_size > self._errors_from
        return (self.errors if has_errors else self.output).stat().st_mtime_ns


class Crew(contextlib.AbstractContextManager["Crew"]):
    """The processes of a lab. As a context manager, it kills those that are left.

    Files in their TMPDIR, such as torchrun's, are removed with the lab.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._members: list[Member] = []

    def __exit__(self, *_: object) -> None:
        for member in list(self._members):
            self.kill(member)

    @property
    def members(self) -> tuple[Member, ...]:
        """The processes that are watched."""
        return tuple(self._members)

    def __contains__(self, member: Member) -> bool:
        """Return whether a process is watched: it was started, and not killed, stopped or finished since."""
        return member in self._members

    def start(
        self,
        name: str,
        node: str,
        argv: Sequence[str | Path],
        *,
        cpus: Collection[int] | None = None,
        environment: Mapping[str, str] | None = None,
        good: Collection[int] = (0,),
    ) -> Member:
        """Start a process in a node's namespace, on these CPUs only; its logs are `name.out` and `name`.

        Exit statuses other than `good` are failures.
        """
        output, errors = self.lab.log(f"{name}.out"), self.lab.log(name)
        for file in (output, errors):
            file.unlink(missing_ok=True)  # readers of an earlier process's log notice a new file
            file.touch()
        temporary = self.lab.directory / TEMPORARY
        temporary.mkdir(exist_ok=True)
        variables = {"TMPDIR": str(temporary), **(environment or {})}

        def launch() -> subprocess.Popen[bytes]:
            with output.open("ab") as out, errors.open("ab") as err:
                return self.lab.start(node, argv, stdout=out, stderr=err, cpus=cpus, environment=variables)

        member = Member(name, output, errors, launch, launch(), good)
        self._members.append(member)
        return member

    def kill(self, member: Member) -> None:
        """Send SIGKILL to a process and its descendants; this does not count as a failure."""
        if member.process.returncode is None:  # otherwise its number may have been reused
            processes.kill_tree(member.process.pid)
            member.process.wait()
        self._forget(member)

    def kill_children(self, member: Member) -> list[int]:
        """Send SIGKILL to a process's descendants, but not to itself; return their numbers.

        This kills a rank but not its `torchrun`, or a service but not its supervisor.
        """
        return processes.kill(member.children())

    def restart(self, member: Member) -> None:
        """Kill a process if it runs, and start it again with the same command; its logs continue."""
        self.kill(member)
        member._output_from = member.output.stat().st_size
        member._errors_from = member.errors.stat().st_size
        member.process = member.launch()
        self._members.append(member)

    def run(self, name: str, node: str, argv: Sequence[str | Path], seconds: float) -> str:
        """Run a command to its end and return its output; raise `LabError` if it fails or times out."""
        member = self.start(name, node, argv)
        self.finish([member], seconds)
        return member.output_text()

    def wait(self, condition: Callable[[], bool], subject: str, seconds: float) -> None:
        """Wait for a condition; raise `LabError` on timeout, or if a process fails meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            self._check()
            if time.monotonic() > deadline:
                raise LabError(f"{subject}: not within {seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def finish(
        self, members: Sequence[Member], seconds: float, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until these processes have ended with status 0; call `tick` meanwhile."""

        def have_ended() -> bool:
            tick()
            return not any(member.running for member in members)

        self.wait(have_ended, f"{', '.join(m.name for m in members)} to end", seconds)
        self._check()
        for member in members:
            self._forget(member)

    def stop(self, member: Member, seconds: float = 10.0) -> None:
        """Stop a process as Ctrl-C does, and wait for it; raise `LabError` if it does not end, or fails."""
        member.process.send_signal(signal.SIGINT)
        try:
            member.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LabError(f"{member.name} doesn't end after SIGINT: {member.last_words()}") from None
        self._forget(member)
        if member.process.returncode not in member.good:
            raise LabError(member.obituary())

    def _forget(self, member: Member) -> None:
        if member in self:
            self._members.remove(member)

    def _failed(self) -> list[Member]:
        return [member for member in self._members if member.process.poll() not in (None, *member.good)]

    def _check(self) -> None:
        """Raise `LabError` with the processes that failed, the likely cause first."""
        if not self._failed():
            return
        self._await_aftermath()
        # Order by last output: a failing process reports before its clean-up, which may outlast its victims.
        failed = sorted(self._failed(), key=Member.wrote_at)
        quoted = "; then ".join(member.obituary() for member in failed[:_QUOTED])
        more = len(failed) - _QUOTED
        raise LabError(f"{quoted}; then {more} more" if more > 0 else quoted)

    def _await_aftermath(self) -> None:
        """Wait for related failures, because a victim may end before the process that caused its failure."""
        deadline = time.monotonic() + _AFTERMATH_SECONDS
        while time.monotonic() < deadline and any(member.running for member in self._members):
            time.sleep(_POLL_SECONDS)


def _text(file: Path, start: int) -> str:
    return file.read_bytes()[start:].decode(errors="replace")


CHECKMATE: Final = (*PYTHON, "-m", "checkmate.cli.entry")
_START_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 30.0


def checkmate(crew: Crew, *arguments: str | Path) -> str:
    """Run a `checkmate` command beside the controller to its end; return its output."""
    return crew.run("checkmate", CONTROLLER, [*CHECKMATE, *arguments], _START_SECONDS)


def status(crew: Crew) -> list[dict[str, Any]]:
    """Return each switch's status of the lab's job, by `checkmate status --json`."""
    return list(json.loads(checkmate(crew, "status", "--json", crew.lab.job_file))["switches"].values())


def await_streams(crew: Crew, seconds: float = _CONNECT_SECONDS) -> None:
    """Wait until all streams of the lab's job are connected; raise `LabError` on timeout."""
    checkmate(crew, "status", "--wait", "--timeout", f"{seconds:g}", crew.lab.job_file)


class LabController:
    """A `checkmate run` process in a lab, from its start until `stop`."""

    def __init__(
        self,
        crew: Crew,
        arguments: Collection[str | Path] = (),
        cpus: Collection[int] | None = None,
        *,
        unless_served: bool = False,
    ) -> None:
        """Set the arguments of `checkmate run`; the default is the lab's job.

        With `unless_served` it may end because another controller serves the switches already.
        """
        self.crew = crew
        good = (0, AnotherPrimary.exit_code) if unless_served else (0,)
        argv = [*CHECKMATE, "run", *(arguments or ("--no-view", crew.lab.job_file))]
        self.member: Member = crew.start("controller", CONTROLLER, argv, cpus=cpus, good=good)
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

    def _needless(self) -> bool:
        """Return whether it has ended because another controller serves, and may do so."""
        status = self.member.process.poll()
        return status == AnotherPrimary.exit_code and status in self.member.good

    def _await_serving(self) -> None:
        self.crew.wait(
            lambda: "serving" in self.member.output_text() or self._needless(),
            "controller to serve",
            _START_SECONDS,
        )


def controlled(
    crew: Crew, *, cpus: Collection[int] | None = None, unless_served: bool = False
) -> contextlib.AbstractContextManager[LabController | None]:
    """Run `checkmate run` on the lab's job until the block ends, if the lab has switches; see `serving`."""
    if not crew.lab.switches:
        return contextlib.nullcontext()
    return serving(crew, cpus=cpus, unless_served=unless_served)


@contextlib.contextmanager
def serving(
    crew: Crew, *arguments: str | Path, cpus: Collection[int] | None = None, unless_served: bool = False
) -> Iterator[LabController]:
    """Run `checkmate run` until the block ends, on the lab's job or with these arguments."""
    controller = LabController(crew, arguments, cpus, unless_served=unless_served)
    try:
        yield controller
    except BaseException:
        controller.kill()  # report the original error, not the controller's end
        raise
    controller.stop()
