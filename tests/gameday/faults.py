"""The acts of a game day, done to real processes, links and disks, and undone in time."""

from __future__ import annotations

import contextlib
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.forked import ForkedLab
from tests.chaos.world import set_first_link, set_port
from tests.gameday.acts import Act, Incident, unsound
from tests.gameday.jobrun import JobRun
from tests.gameday.parties import CONTROLLERS, SWITCHES
from topologies.crew import CHECKMATE, Crew, Member
from topologies.describe.topology import CONTROLLER
from topologies.kernel import mounts, namespaces

_SETTLES: Final = 5.0
"""Seconds after which a node's status is reliable if copies were dropped: gaps are noticed late."""
_DISK_BYTES: Final = 8 << 20
_LOG_BYTES: Final = 1 << 20
_BLOCK: Final = bytes(1 << 12)


@dataclass
class Ground:
    """A lab with its jobs and two controllers."""

    lab: ForkedLab
    crew: Crew
    jobs: Mapping[str, JobRun] = field(default_factory=dict)
    controllers: dict[str, Member] = field(default_factory=dict)

    def start_controllers(self) -> None:
        """Start both; one of them serves, the other one waits."""
        for name in CONTROLLERS:
            argv = [*CHECKMATE, "run", "--standby", "--no-view", "--metrics", self.metrics_of(name)]
            argv += ["--events", str(self.lab.directory / f"events-{name}")]
            files = [self.lab.job_file_of(job) for job in self.lab.topology.jobs if job.switches]
            self.controllers[name] = self.crew.start(name, CONTROLLER, [*argv, *files])
        self.crew.wait(lambda: self.primary() is not None, "a controller to serve", 60)

    def metrics_of(self, controller: str) -> str:
        """Return the address of a controller's metrics."""
        return f"127.0.0.1:{9460 + CONTROLLERS.index(controller)}"

    def primary(self) -> str | None:
        """Return the controller that serves all switches, if one does."""
        with namespaces.entered(self.lab.namespace(CONTROLLER)):
            return next((name for name in CONTROLLERS if _is_ready(self.metrics_of(name))), None)

    def mount_disks(self) -> None:
        """Give each job a small disk for checkpoints, and one for the event log of its node 0."""
        for job in self.jobs.values():
            mounts.mount_tmpfs(job.world.disk, _DISK_BYTES)
            mounts.mount_tmpfs(job.world.log_disk, _LOG_BYTES)


class Acting:
    """Does the acts of one incident at their times, and undoes them; `tick` drives it."""

    def __init__(self, ground: Ground, incident: Incident, say: Callable[[str, str], None]) -> None:
        self._ground, self._say = ground, say
        self._began = time.monotonic()
        self._waiting = list(incident.acts)
        self._disk = incident.disk
        self._undo: list[tuple[float, Act, Callable[[], None]]] = []
        self.down: set[str] = set()
        """Who was killed and is not back."""
        self.acts: list[Act] = []
        """Acts with the times at which they were done and undone, since the incident began."""

    @property
    def is_over(self) -> bool:
        """Whether all acts are undone."""
        return not self._waiting and not self._undo

    def tick(self) -> None:
        """Do and undo what is due."""
        while self._waiting and self._waiting[0].at <= self._now():
            self._do(self._waiting.pop(0))
        for undo in sorted(self._undo, key=lambda entry: entry[0]):
            if undo[0] <= self._now():
                self._undo.remove(undo)
                undo[2]()
                self.down.discard(undo[1].who)
                self.acts = [self._with_end(act) if act is undo[1] else act for act in self.acts]
                self._say(undo[1].job or "fabric", f"end of {undo[1]}")

    def undo_all(self) -> None:
        """Undo what is not undone yet, whatever the reason to end."""
        for _, _, undo in self._undo:
            with contextlib.suppress(OSError):
                undo()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _with_end(self, act: Act) -> Act:
        return Act(act.at, act.kind, act.who, self._now() - act.at)

    def _do(self, planned: Act) -> None:
        target = planned.who if planned.who != "primary" else self._ground.primary() or CONTROLLERS[0]
        act = Act(self._now(), planned.kind, target, planned.seconds)
        self._say(act.job or "fabric", str(act))
        self.acts.append(act)
        for name, job in self._ground.jobs.items():
            for node in unsound([act], name):
                job.watch.lose(node, time.monotonic() + act.seconds + (_SETTLES if act.node is None else 0.0))
        undo = getattr(self, f"_{act.kind}")(act)
        if undo is not None:
            self._undo.append((act.end, act, undo))

    def _kill(self, act: Act) -> Callable[[], None] | None:
        lab, crew = self._ground.lab, self._ground.crew
        if act.part.startswith("rank"):
            job = self._ground.jobs[act.job]
            job.struck = True
            job.expects_disk = act.job in self._disk
            job.world.ranks[int(act.part.removeprefix("rank"))].send_signal(signal.SIGKILL)
            return None
        self.down.add(act.who)
        if act.who in SWITCHES:
            lab.stop_switch(act.who)
            return lambda: lab.restart_switch(act.who)
        if act.who in CONTROLLERS:
            member = self._ground.controllers[act.who]
            crew.kill(member)
            return lambda: crew.restart(member)
        node, world = act.node, self._ground.jobs[act.job].world
        assert node is not None
        crew.kill(world.shadows[node])
        return lambda: world.start_shadow_node(node)

    def _stall(self, act: Act) -> Callable[[], None]:
        world = self._ground.jobs[act.job].world
        if act.node is not None:
            process = world.shadows[act.node].process
        else:
            process = world.ranks[int(act.part.removeprefix("rank"))]
        process.send_signal(signal.SIGSTOP)
        return lambda: process.send_signal(signal.SIGCONT)

    def _down(self, act: Act) -> Callable[[], None]:
        lab = self._ground.lab
        if act.node is not None:
            host = self._ground.jobs[act.job].world.topology.shadow_nodes[act.node]
            set_first_link(lab, host, up=False)
            return lambda: set_first_link(lab, host, up=True)
        near, far = act.who.split("-")
        port = next(own_port for own_port, far_end, _ in lab.topology.links_at(near) if far_end == far)
        set_port(lab, near, port, up=False)
        return lambda: set_port(lab, near, port, up=True)

    def _fill(self, act: Act) -> Callable[[], None]:
        world = self._ground.jobs[act.job].world
        return fill(world.disk if act.part == "disk" else world.log_disk)


def fill(disk: Path) -> Callable[[], None]:
    """Fill a disk; return what makes room again."""
    file = disk / "filled"
    with file.open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while True:
            rest.write(_BLOCK)
    return file.unlink


def _is_ready(address: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
