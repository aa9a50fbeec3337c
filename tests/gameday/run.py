"""A game day from the lab to the verdict."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.forked import ForkedLab
from tests.gameday import prometheus, rules
from tests.gameday.acts import Act, Incident
from tests.gameday.alarms import Alarm, Expectation, expectations, judge
from tests.gameday.draw import schedule
from tests.gameday.faults import Acting, Ground
from tests.gameday.jobrun import GamedayWorld, JobRun
from tests.gameday.parties import CONTROLLERS, PARTIES, lab
from topologies import lab as labs
from topologies.crew import Crew
from topologies.describe.topology import LabError

Say = Callable[[str, str], None]
_POLL_SECONDS: Final = 0.05
_WELL_SECONDS: Final = 90.0
"""Within which everything has to be well after an incident."""
_CALM_SECONDS: Final = 3.0
_QUOTED: Final = 300


@dataclass
class Past:
    """An incident, with its acts as they were done, in seconds since the game day began."""

    incident: Incident
    acts: list[Act]
    well: float
    """When everything was well again."""


@dataclass
class Outcome:
    """What happened on a game day; without `problems`, it passed."""

    seed: int
    past: list[Past] = field(default_factory=list)
    resumes: dict[str, list[str]] = field(default_factory=dict)
    iterations: dict[str, int] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)
    expected: list[Expectation] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    without_alerts: str = ""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run(
    seed: int,
    minutes: float,
    *,
    name: str = "",
    kinds: tuple[str, ...] = (),
    keep: Path | None = None,
    say: Say = lambda _, __: None,
) -> Outcome:
    """Run the schedule of a seed; incidents begin for this number of minutes."""
    outcome, began = Outcome(seed), time.monotonic()
    name = name or f"gameday{os.getpid()}"
    ForkedLab.serve()
    try:
        with ForkedLab(lab(name), name=name) as forked_lab, Crew(forked_lab) as crew:
            day = GameDay(outcome, forked_lab, crew, say)
            try:
                day.run(schedule(seed, kinds=kinds), minutes)
            finally:
                if keep is not None:
                    shutil.rmtree(keep, ignore_errors=True)
                    shutil.copytree(forked_lab.directory, keep, ignore=shutil.ignore_patterns("tmp", "lock"))
                day.end_processes()
    except LabError as error:
        outcome.problems.append(str(error))
    finally:
        labs.down(name)
    outcome.seconds = time.monotonic() - began
    return outcome


class GameDay:
    """The day in its lab."""

    def __init__(self, outcome: Outcome, forked_lab: ForkedLab, crew: Crew, say: Say) -> None:
        self._outcome, self._lab, self._crew, self._say = outcome, forked_lab, crew, say
        self._ground = Ground(forked_lab, crew)
        self._jobs: dict[str, JobRun] = {}
        self._acting: Acting | None = None
        self._prometheus: prometheus.LabPrometheus | None = None
        self._began = self._clock = 0.0

    def run(self, incidents: Iterator[Incident], minutes: float) -> None:
        """Run incidents until the time is over, then let all jobs end, and judge."""
        self._begin()
        while not self._problems() and self._now() < 60 * minutes:
            self._run_incident(next(incidents))
        self._end_training()
        self._judge_alerts()
        if not self._outcome.problems:
            self._compare()
        self._look_at_logs()

    def end_processes(self) -> None:
        """End what is left, by SIGKILL."""
        if self._acting is not None:
            self._acting.undo_all()
        for job in self._jobs.values():
            job.world.end_ranks()

    def _begin(self) -> None:
        self._lab.directory.joinpath("events").mkdir()
        for party, topology in zip(PARTIES.values(), self._lab.topology.jobs, strict=True):
            world = GamedayWorld(party, self._outcome.seed, self._lab, self._crew, topology)
            self._jobs[party.name] = JobRun(party, world, self._say)
        self._ground.jobs = self._jobs
        self._ground.mount_disks()
        self._ground.start_controllers()
        for job in self._jobs.values():
            for node in job.party.nodes:
                job.world.start_shadow_node(node)
        for job in self._jobs.values():
            job.world.await_shadow_nodes()
            job.world.start_keeper()
            job.start()
        self._until(self._is_well, "all jobs to train")
        self._began, self._clock = time.monotonic(), time.time()
        self._start_prometheus()

    def _start_prometheus(self) -> None:
        self._outcome.without_alerts = prometheus.missing()
        if not self._outcome.without_alerts:
            controllers = [self._ground.metrics_of(name) for name in CONTROLLERS]
            worlds = [job.world for job in self._jobs.values()]
            other_targets = [
                target for world in worlds for target in (*world.node_metrics, world.keeper_metrics)
            ]
            self._prometheus = prometheus.LabPrometheus(self._lab, self._crew, [*controllers, *other_targets])

    def _run_incident(self, incident: Incident) -> None:
        self._say("incident", str(incident))
        began, newest_before = self._now(), {name: job.world.newest() for name, job in self._jobs.items()}
        self._acting = acting = Acting(self._ground, incident, self._say)
        lasts = max(act.end for act in incident.acts)
        self._until(lambda: acting.is_over, f"{incident} to be over", seconds=lasts + _WELL_SECONDS)
        news = {name: job.log.newest for name, job in self._jobs.items()}

        def well() -> bool:
            """Return whether all jobs are well, and have trained and been saved since."""
            has_saved = all(job.world.newest() > newest_before[name] for name, job in self._jobs.items())
            trained = all(job.log.newest > news[name] for name, job in self._jobs.items())
            return has_saved and trained and self._is_well()

        self._until(well, f"everything to be well after {incident.name}")
        acts = [Act(began + act.at, act.kind, act.who, act.seconds) for act in acting.acts]
        self._outcome.past.append(Past(incident, acts, self._now()))
        self._say("incident", f"all is well, {self._now() - began:.1f} s after it began")
        calm = self._now() + _CALM_SECONDS
        self._until(lambda: self._now() > calm, "some calm")

    def _end_training(self) -> None:
        for job in self._jobs.values():
            job.finish()
        self._until(lambda: all(job.is_over for job in self._jobs.values()), "all jobs to end")
        for name, job in self._jobs.items():
            self._outcome.resumes[name] = job.resumes
            self._outcome.iterations[name] = job.log.newest + 1
            self._outcome.repeated[name] = job.log.repeated
            self._outcome.problems += job.problems

    def _judge_alerts(self) -> None:
        if self._prometheus is None:
            return
        begin = time.time() - self._now()
        self._outcome.alarms = self._prometheus.alarms(begin, time.time())
        self._crew.kill(self._prometheus.member)
        delays = rules.delays(rules.faster(prometheus.rules()))
        names = {name: job.world.topology.name for name, job in self._jobs.items()}
        for past in self._outcome.past:
            self._outcome.expected += expectations(past.acts, delays, names)
        self._outcome.problems += judge(self._outcome.expected, self._outcome.alarms)

    def _compare(self) -> None:
        """Train all jobs undisturbed, in turn, and compare all iterations."""
        for name, job in self._jobs.items():
            self._say(name, f"{job.log.newest + 1} iterations undisturbed")
            job.start_reference()
            _finish(job.world.ranks, 120 + 0.2 * job.log.newest)
            job.compare()
            self._outcome.problems += job.problems

    def _look_at_logs(self) -> None:
        """Note messages that must not be in the logs of nodes, controllers and `consolidate`."""
        members = [*self._ground.controllers.values()]
        for job in self._jobs.values():
            members += [*job.world.shadows.values(), *([job.world.keeper] if job.world.keeper else [])]
        for member in members:
            for line in member.errors.read_text(errors="replace").splitlines():
                if "Traceback" in line or " differ" in line:
                    self._outcome.problems.append(f"{member.name}: {line[:_QUOTED]}")

    def _is_well(self) -> bool:
        primary = self._ground.primary() is not None
        return primary and all(job.on_its_way and job.world.on_disk for job in self._jobs.values())

    def _until(self, condition: Callable[[], bool], event: str, seconds: float = _WELL_SECONDS) -> None:
        """Drive everything until a condition holds; it is looked at four times a second."""
        deadline, look = time.monotonic() + seconds, 0.0
        while not self._problems():
            if self._acting is not None:
                self._acting.tick()
            down = self._acting.down if self._acting is not None else set()
            for job in self._jobs.values():
                job.tick(down.__contains__)
            self._check_crew()
            if time.monotonic() > look:
                if condition():
                    return
                look = time.monotonic() + 0.25
            if time.monotonic() > deadline:
                self._outcome.problems.append(f"{event}: not within {seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def _check_crew(self) -> None:
        """Note processes that have ended by themselves."""
        for member in self._crew.members:
            if not member.running:
                self._outcome.problems.append(member.obituary())

    def _problems(self) -> bool:
        return bool(self._outcome.problems) or any(job.problems for job in self._jobs.values())

    def _now(self) -> float:
        return time.monotonic() - self._began


def _finish(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            raise LabError(f"the undisturbed run failed, or lasts longer than {seconds:g} s")
        time.sleep(_POLL_SECONDS)
