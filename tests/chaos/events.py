"""The events of a scenario in its lab, and the losses of shadow nodes that they may cause."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

from tests.chaos.oracle import loses, settles
from tests.chaos.scenario import Event
from tests.chaos.sound import SoundnessWatch
from tests.chaos.world import ChaosWorld

BY_SCRIPT = ("error", "close")
"""Kinds of events that the script itself triggers."""


class Schedule:
    """Past and future events. `tick` is called every few milliseconds, and returns quickly."""

    def __init__(self, world: ChaosWorld) -> None:
        self._world = world
        self._waiting = [event for event in world.scenario.events if event.kind not in BY_SCRIPT]
        self._schedule: list[tuple[float, Callable[[], None]]] = []
        self._again: set[str] = set()
        self.watch = SoundnessWatch(world.shadows, world.is_live)
        self.begun_events: list[str] = []
        self.struck = False
        """Whether an event ends this start of the ranks."""

    @property
    def idle(self) -> bool:
        """Return whether no event is in progress, and everything that was killed has been restarted."""
        return not self._schedule and not self._again

    def is_down(self, target: str) -> bool:
        """Return whether a process has been killed, and is not yet started again."""
        return target in self._again

    def tick(self, completed: int) -> None:
        """Trigger the events that are due; `completed` is the newest iteration that rank 0 ever completed."""
        now = time.monotonic()
        for event in [event for event in self._waiting if event.at <= completed]:
            self._waiting.remove(event)
            self._schedule.append((now + event.delay, lambda event=event: self._begin(event)))  # type: ignore[misc]
        for entry in sorted(
            (entry for entry in self._schedule if entry[0] <= now), key=lambda entry: entry[0]
        ):
            self._schedule.remove(entry)
            entry[1]()
        self._look()

    def _begin(self, event: Event) -> None:
        world, target, now = self._world, event.who, time.monotonic()
        if target in self._again:
            return  # it has already ended
        phase = f", {world.phase(target)}" if world.scenario.network.in_place else ""
        self.begun_events.append(f"{event} (start {world.attempt}{phase})")
        for node in loses(event, world.scenario.network, world.controller_is_down):
            self.watch.lose(node, now + event.seconds + settles(event))
        if event.kind == "stall":
            process = world.process(target)
            process.send_signal(signal.SIGSTOP)
            self._after(event.seconds, lambda: process.send_signal(signal.SIGCONT))
        elif event.kind == "down":
            world.set_link(target, up=False)
            self._after(event.seconds, lambda: world.set_link(target, up=True))
        elif target.startswith(("rank", "spare")):
            self.struck = True
            world.signal(target, signal.SIGTERM if event.kind == "terminate" else signal.SIGKILL)
        else:
            self._kill(event)

    def _kill(self, event: Event) -> None:
        """Kill a process that its supervisor restarts."""
        world, target = self._world, event.who
        self._again.add(target)
        if target.startswith("host"):
            host = int(target.removeprefix("host"))
            launcher = world.ranks[host]
            launcher.kill()
            self._after(event.seconds, lambda: self._restart_launcher(host, launcher))
        elif target == "ctl":
            controller = world.controller
            assert controller is not None
            world.controller_is_down = True
            controller.kill()
            self._after(event.seconds, lambda: world.crew.restart(controller.member))
        elif target.startswith("tor"):
            world.lab.stop_switch(target)
            self._after(event.seconds, lambda: self._restart_switch(target))
        else:
            number = int(target.removeprefix("shadow"))
            world.crew.kill(world.shadows[number])
            self._after(event.seconds, lambda: self._restart_shadow_node(number))

    def _restart_switch(self, switch: str) -> None:
        self._world.lab.restart_switch(switch)
        self._again.discard(switch)

    def _restart_shadow_node(self, number: int) -> None:
        self._world.start_shadow_node(number)
        self._again.discard(f"shadow{number}")

    def _restart_launcher(self, host: int, killed: subprocess.Popen[bytes]) -> None:
        """Start a launcher again, unless all ranks have been started again meanwhile."""
        if self._world.ranks[host] is killed:
            self._world.ranks[host] = self._world.start_launcher(host)
        self._again.discard(f"host{host}")

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._schedule.append((time.monotonic() + seconds, do))

    def _look(self) -> None:
        """Check for shadow nodes that are live again, and for a controller that serves again."""
        world = self._world
        member = world.controller.member if world.controller_is_down and world.controller else None
        if member is not None and member in world.crew and "serving" in member.output_text():
            world.controller_is_down = False
            self._again.discard("ctl")
        self.watch.look(lambda node: f"shadow{node}" in self._again)
