"""Processes that a lab runs for a while, watched together: those that fail end the run and are quoted."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from topologies.describe import LabError
from topologies.lab import Lab

_POLL_SECONDS = 0.05
_AFTERMATH_SECONDS = 1.0
_QUOTED = 4


@dataclass(frozen=True)
class Member:
    """A process, and the files that it writes its output and its errors to."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    errors: Path

    def obituary(self) -> str:
        """That it failed, for an error message."""
        return f"{self.name} ended with status {self.process.returncode}: {self.last_words()}"

    def last_words(self) -> str:
        """The end of what it said, for an error message."""
        text = self._said().read_text(errors="replace")
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "it said nothing"

    def spoke(self) -> int:
        """When it wrote its last words, in ns."""
        return self._said().stat().st_mtime_ns

    def _said(self) -> Path:
        return self.errors if self.errors.stat().st_size else self.output


class Crew:
    """Starts processes in a lab and waits for them."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._members: list[Member] = []

    def start(self, name: str, node: str, argv: Sequence[str | Path]) -> Member:
        """Start a process in a node's namespace."""
        output, errors = self._lab.log(f"{name}.out"), self._lab.log(name)
        with output.open("wb") as out, errors.open("wb") as err:
            process = self._lab.start(node, argv, stdout=out, stderr=err)
        member = Member(name, process, output, errors)
        self._members.append(member)
        return member

    def run(self, name: str, node: str, argv: Sequence[str | Path], seconds: float) -> str:
        """Run a command to its end; its output. `LabError` where it fails or takes too long."""
        member = self.start(name, node, argv)
        self.finish([member], seconds)
        return member.output.read_text()

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until something holds; `LabError` where it doesn't in time, or a process fails meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            self._check()
            if time.monotonic() > deadline:
                raise LabError(f"{what}: not within {seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def finish(
        self, members: Sequence[Member], seconds: float, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until these have ended well; `tick` is called meanwhile."""

        def ended() -> bool:
            tick()
            return all(member.process.poll() is not None for member in members)

        self.wait(ended, f"{', '.join(m.name for m in members)} to end", seconds)
        self._check()
        self._members = [member for member in self._members if member not in members]

    def stop(self, member: Member, seconds: float = 10.0) -> None:
        """Ask a process to end, as Ctrl-C does, and wait for it."""
        member.process.send_signal(signal.SIGINT)
        self._members.remove(member)
        try:
            member.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LabError(f"{member.name} doesn't end after SIGINT: {member.last_words()}") from None
        if member.process.returncode:
            raise LabError(member.obituary())

    def _failed(self) -> list[Member]:
        return [member for member in self._members if member.process.poll() not in (None, 0)]

    def _check(self) -> None:
        """`LabError` with those that failed, the likely cause first."""
        if not self._failed():
            return
        self._await_aftermath()
        # What a process says comes before its clean-up, whose end may be later than that of its victims.
        failed = sorted(self._failed(), key=Member.spoke)
        quoted = "; then ".join(member.obituary() for member in failed[:_QUOTED])
        more = len(failed) - _QUOTED
        raise LabError(f"{quoted}; then {more} more" if more > 0 else quoted)

    def _await_aftermath(self) -> None:
        """Let others fail too: a victim may have ended before what it fell to."""
        deadline = time.monotonic() + _AFTERMATH_SECONDS
        while time.monotonic() < deadline and any(m.process.poll() is None for m in self._members):
            time.sleep(_POLL_SECONDS)
