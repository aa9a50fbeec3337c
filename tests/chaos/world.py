"""A scenario's lab: its processes, and the faults that can be injected."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.chaos.forked import ForkedLab
from tests.chaos.job import JobWorld
from tests.chaos.scenario import Scenario
from tests.chaos.training_log import TrainingLog
from topologies.crew import Crew, LabController
from topologies.describe.topology import CONTROLLER, LabHost
from topologies.kernel.namespaces import netlink
from topologies.lab import Lab


class SignalTarget(Protocol):
    """A process that takes signals."""

    def send_signal(self, number: int, /) -> None:
        """Send one, unless it has ended."""


class _Process:
    """A process of which the number is known, if it has started."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def send_signal(self, number: int, /) -> None:
        if self._number is not None:
            with suppress(ProcessLookupError):
                os.kill(self._number, number)


def _children(process: int) -> list[int]:
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(number) for number in text.split()]


class ChaosWorld(JobWorld):
    """The lab's job with its controller, if it has switches."""

    def __init__(
        self, scenario: Scenario, lab: ForkedLab, crew: Crew, controller: LabController | None, folder: Path
    ) -> None:
        super().__init__(scenario, lab, crew, folder)
        self.log = TrainingLog(folder, scenario.network.world)
        self.controller = controller
        self.controller_is_down = False

    def signal(self, process_name: str, number: signal.Signals) -> None:
        """Send a signal to the current process of a name, unless it has ended."""
        self.process(process_name).send_signal(number)

    def process(self, process_name: str) -> SignalTarget:
        """Return the process of a name."""
        if process_name.startswith("rank"):
            rank = int(process_name.removeprefix("rank"))
            return _Process(self.launched_pid(rank)) if self.scenario.network.in_place else self.ranks[rank]
        if process_name.startswith("host"):
            return self.ranks[int(process_name.removeprefix("host"))]
        if process_name.startswith("spare"):
            return _Process(self._spare(self.ranks[int(process_name.removeprefix("spare"))].pid))
        if process_name.startswith("shadow"):
            return self.shadows[int(process_name.removeprefix("shadow"))].process
        if process_name == "ctl":
            assert self.controller is not None
            return self.controller.member.process
        return self.lab.switch_process(process_name)

    def _spare(self, launcher: int) -> int | None:
        """Return a launcher's spare. Ranks that it has forked have its command line, too."""
        ranks = {self.launched_pid(rank) for rank in range(self.scenario.network.world)}
        for child in _children(launcher):
            with suppress(FileNotFoundError):
                if (
                    "checkmate.launch.spare" in Path(f"/proc/{child}/cmdline").read_text()
                    and child not in ranks
                ):
                    return child
        return None

    def phase(self, process_name: str) -> str:
        """Return what a rank has noted last; "" for other processes."""
        if not process_name.startswith("rank"):
            return ""
        rank = int(process_name.removeprefix("rank"))
        return self.log.phase(rank, self.launched_pid(rank))

    def set_link(self, host_name: str, *, up: bool) -> None:
        """Set the far end of a rank's or a shadow node's first link up or down."""
        hosts = {rank.name: rank.host for rank in self.lab.topology.ranks}
        set_first_link(self.lab, hosts.get(host_name) or self.lab.topology.host(host_name), up=up)


def set_first_link(lab: Lab, host: LabHost, *, up: bool) -> None:
    """Set the far end of a host's first link up or down: a port of its switch, or else of the bridge."""
    if host.interfaces:
        set_port(lab, host.interfaces[0].switch, host.interfaces[0].port, up=up)
    else:
        _set_interface(lab.namespace(CONTROLLER), host.name, up=up)


def set_port(lab: Lab, switch: str, port: int, *, up: bool) -> None:
    """Set a port of a switch up or down."""
    _set_interface(lab.namespace(switch), f"port{port}", up=up)


def _set_interface(namespace: str, name: str, *, up: bool) -> None:
    with netlink(namespace) as ip:
        index = ip.link_lookup(ifname=name)[0]
        ip.link("set", index=index, state="up" if up else "down")
