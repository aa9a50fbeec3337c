"""The run of a scenario in a lab, compared with the promises and with the undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.events import Schedule
from tests.chaos.forked import ForkedLab
from tests.chaos.oracle import ResumePromise, promise
from tests.chaos.scenario import Scenario
from tests.chaos.script import ANEW
from tests.chaos.world import ChaosWorld
from topologies import lab as labs
from topologies.crew import Crew, controlled
from topologies.describe.topology import LabError, build

SECONDS = 120.0
"""A scenario hangs if nothing was trained for this time."""
STACK_SECONDS = 15.0
"""Time after which ranks are asked for their stacks, before their own waits end."""
_POLL_SECONDS = 0.01
_STARTS = 12
_QUOTED = 300


class HarnessError(Exception):
    """A failure of the harness itself or of the undisturbed run, without a verdict."""


@dataclass
class TrialOutcome:
    """The outcome of a scenario. `problems` are broken promises; it passed if there are none."""

    scenario: Scenario
    promises: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    repeated: int = 0
    longest: float = 0.0
    """The longest time between two iterations, in seconds."""
    seconds: float = 0.0
    logs: str = ""

    @property
    def has_passed(self) -> bool:
        """Whether all promises were kept."""
        return not self.problems


def run(
    scenario: Scenario, *, keep: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> TrialOutcome:
    """Run a scenario; raise `HarnessError` without a verdict.

    `keep` is a folder for the logs if it fails.
    """
    outcome, began = TrialOutcome(scenario), time.monotonic()
    name = f"x{os.getpid()}_{random.randrange(10**4)}"
    topology = build(name, scenario.network.topology())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            with (
                _harmless(signal.SIGUSR1),  # ranks are asked for their stacks, perhaps before they have begun
                ForkedLab(
                    topology,
                    name=name,
                    loss=scenario.network.loss,
                    copy_loss=scenario.network.copy_loss,
                    progress=progress,
                ) as lab,
                Crew(lab) as crew,
                controlled(crew) as controller,
            ):
                world = ChaosWorld(scenario, lab, crew, controller, folder)
                try:
                    Trial(world, outcome, progress).run()
                finally:
                    crew_logs(world, outcome)
                    if outcome.problems and keep is not None:
                        outcome.logs = _keep(lab.directory, folder, keep / f"seed{scenario.seed}")
                    for member in [*world.shadows.values(), *([world.keeper] if world.keeper else [])]:
                        crew.kill(member)
        except LabError as error:
            outcome.problems.append(str(error))
        finally:
            labs.down(name)
    outcome.seconds = time.monotonic() - began
    return outcome


@contextmanager
def _harmless(number: signal.Signals) -> Iterator[None]:
    """Have processes that are started meanwhile ignore a signal until they handle it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def crew_logs(world: ChaosWorld, outcome: TrialOutcome) -> None:
    """Note messages in logs that must not occur."""
    for file in sorted(world.lab.directory.glob("*.log")):
        if file.name.startswith(("rank", "reference", "keeper")) or file.name.endswith(".out.log"):
            continue  # logs of ranks that are killed or lose another may have any error
        text = file.read_text(errors="replace")
        for bad in ("Traceback", " differ"):
            if bad in text:
                line = next(line for line in text.splitlines() if bad in line)
                outcome.problems.append(f"{file.name}: {line[:_QUOTED]}")


def _keep(lab: Path, folder: Path, to: Path) -> str:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(lab, to / "lab", ignore=shutil.ignore_patterns("tmp"))
    shutil.copytree(folder, to / "job")
    return str(to)


class Trial:
    """One job from its first start to the check of its end."""

    def __init__(self, world: ChaosWorld, outcome: TrialOutcome, progress: Callable[[str], None]) -> None:
        self._world, self._outcome, self._progress = world, outcome, progress
        self._scenario = world.scenario
        self._log = world.log
        self._clean: set[int] = set()
        """Attempts that have ended by a clean stop."""
        self._since = 0
        """The first attempt whose state can be resumed: before it, nodes were reset."""
        self._resumed: int | None = None
        """The first iteration of this start, or of its last recovery in place."""
        self._is_unrestorable = False
        """Whether all ranks have to be started again, with nodes that were reset."""
        self._progressed = (-1, time.monotonic())
        self._has_asked = False
        """The newest iteration, and when it was trained: on a busy machine all takes long."""
        self._fresh = False

    def run(self) -> None:
        """Run all of it; broken promises are in the outcome."""
        world = self._world
        for node in range(len(self._scenario.network.nodes)):
            world.start_shadow_node(node)
        self._progress("the undisturbed run")
        self._await_reference(world.start_reference())
        world.await_shadow_nodes()
        self._schedule = Schedule(world)
        world.start_keeper()
        self._outcome.happened = self._schedule.begun_events
        last = False
        while not self._outcome.problems:
            self._start()
            clean = self._follow()
            if self._outcome.problems or last:
                break
            self._note(clean)
            last = clean and self._log.newest + 1 >= self._scenario.model.iterations
            if last:
                self._until(lambda: self._schedule.idle, "everything to be there again")
        self._compare()

    def _start(self) -> None:
        self._resumed, self._is_unrestorable = None, False
        self._schedule.struck = False
        if self._world.attempt + 1 >= _STARTS:
            self._outcome.problems.append(f"not through after {_STARTS} starts")
        self._world.start_ranks(fresh=self._fresh)
        self._progress(f"start {self._world.attempt}")

    def _follow(self) -> bool:
        """Wait until this start has ended; return whether all ranks exited with 0."""
        while True:
            self._tick()
            statuses = [
                None if self._schedule.is_down(f"host{number}") else process.poll()
                for number, process in enumerate(self._world.ranks)
            ]
            if self._outcome.problems or self._is_unrestorable:
                self._world.end_ranks()
                return False
            if all(status == 0 for status in statuses):
                self._tick()
                return True
            if any(statuses):
                self._failed(statuses)
                self._world.end_ranks()
                self._tick()
                return False
            self._check_crew()
            time.sleep(_POLL_SECONDS)

    def _failed(self, statuses: list[int | None]) -> None:
        """Handle a failed rank: by an event, because it could not resume, or by a defect."""
        time.sleep(0.2)  # others may have more output
        rank = next(rank for rank, status in enumerate(statuses) if status)
        words = [self._world.last_words(r) for r in range(len(statuses))]
        self._fresh = False
        nothing = [word for word in words if "RestoreError" in word]
        if self._scenario.network.in_place:
            self._ended_by_itself(rank, statuses[rank], words)
        elif nothing and self._resumed is None:
            self._check(self._world.attempt, None)
            self._outcome.seen.append(nothing[0][:_QUOTED])
            self._fresh = True
        elif statuses[rank] == ANEW:
            self._fresh = True
        elif not self._schedule.struck and not any("as ordered" in word for word in words):
            self._ended_by_itself(rank, statuses[rank], words)

    def _ended_by_itself(self, rank: int, status: int | None, words: list[str]) -> None:
        name = "host" if self._scenario.network.in_place else "rank"
        last_words = "; ".join(f"{name}{r} said last: {word}" for r, word in enumerate(words))
        self._outcome.problems.append(f"{name}{rank} ended with status {status} by itself; {last_words}")

    def _note(self, clean: bool) -> None:
        """Record a start that has ended."""
        if self._fresh and not clean:
            self._since = self._next_attempt
        if clean:
            self._clean.add(self._next_attempt - 1)
            self._fresh = False

    @property
    def _next_attempt(self) -> int:
        """The next attempt's number: each recovery in place is one, too."""
        return self._log.next_attempt if self._scenario.network.in_place else self._world.attempt + 1

    def _tick(self) -> None:
        for line in self._log.look():
            if line["event"] == "resumed":
                self._resumed = int(line["iteration"])
                self._check(line["attempt"], self._resumed)
            elif line["event"] == "protected":
                self._schedule.watch.protected(line["at"])
            elif self._scenario.network.in_place and line["event"] in ("unresumable", "unrestorable"):
                self._begin_anew(line)
        self._outcome.repeated, self._outcome.longest = self._log.repeated, self._log.longest
        self._schedule.tick(self._log.newest)

    def _begin_anew(self, line: Mapping[str, Any]) -> None:
        """Have all ranks started with nodes that were reset, if one can't resume in place."""
        if line["event"] == "unrestorable":
            promised = self._promise(line["attempt"])
            if promised is None or not promised.lost or promised.on_disk:
                return  # another rank died meanwhile, or only new processes can use the checkpoint on disk
            self._outcome.seen.append(str(line["why"])[:_QUOTED])
        self._is_unrestorable = self._fresh = True

    def _promise(self, attempt: int) -> ResumePromise | None:
        """Return the promise for an attempt; `None` for the first one."""
        before = self._log.past_start(self._since, attempt, self._clean)
        if before is None:
            return None
        facts = self._schedule.watch.facts
        return promise(self._scenario.network, facts, before, time.monotonic(), on_disk=self._world.on_disk)

    def _check(self, attempt: int, resumed: int | None) -> None:
        """Check an attempt against its promise."""
        if (promised := self._promise(attempt)) is None:
            return
        self._outcome.promises.append(f"start {self._world.attempt}: {promised}")
        self._outcome.seen.append(f"start {self._world.attempt}: resumed with {resumed}")
        if wrong := promised.broken_by(resumed, silent=resumed == 0):
            self._outcome.problems.append(f"start {self._world.attempt}: {wrong}")

    def _check_crew(self) -> None:
        """Check that no process of the lab has ended by itself, and that the scenario does not hang."""
        world = self._world
        for member in [*world.shadows.values(), *([world.keeper] if world.keeper else [])]:
            if member in world.crew and not member.running:
                self._outcome.problems.append(member.obituary())
        if self._log.newest != self._progressed[0]:
            self._progressed, self._has_asked = (self._log.newest, time.monotonic()), False
        if time.monotonic() > self._progressed[1] + STACK_SECONDS and not self._has_asked:
            self._has_asked = True
            for rank in range(self._scenario.network.world):
                with suppress(OSError, LookupError):  # it has ended
                    world.signal(f"rank{rank}", signal.SIGUSR1)
        if time.monotonic() > self._progressed[1] + SECONDS:
            words = [world.last_words(rank) for rank in range(len(world.ranks))]
            states = [p.poll() for p in world.ranks]
            last_words = "; ".join(f"rank{r} ({states[r]}) said last: {word}" for r, word in enumerate(words))
            self._outcome.problems.append(
                f"nothing was trained for {SECONDS:g} s, after {self._log.newest}; {last_words}"
            )

    def _until(self, condition: Callable[[], bool], event: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            self._schedule.tick(self._log.newest)
            if time.monotonic() > deadline:
                self._outcome.problems.append(f"{event}: not within 30 s")
                return
            time.sleep(_POLL_SECONDS)

    def _await_reference(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + 2 * SECONDS
        while any(process.poll() is None for process in ranks):
            if time.monotonic() > deadline or any(process.poll() for process in ranks):
                for process in ranks:
                    process.kill()
                logs = sorted(self._world.lab.directory.glob("reference*.log"))
                log_text = "\n".join(file.read_text()[-2000:] for file in logs)
                raise HarnessError(f"seed {self._scenario.seed}: the undisturbed run failed:\n{log_text}")
            time.sleep(_POLL_SECONDS)

    def _compare(self) -> None:
        self._outcome.problems += self._log.differences(broadcast=not self._scenario.network.sharded)
