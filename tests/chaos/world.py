"""A scenario's lab: its processes, and the faults that can be injected."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from tests.chaos.forked import ForkedLab
from tests.chaos.job import JobWorld
from tests.chaos.scenario import Scenario
from topologies.crew import Crew, LabController
from topologies.kernel.namespaces import netlink
from topologies.lab import Lab


class ChaosWorld(JobWorld):
    """The lab's job with its controller."""

    def __init__(
        self, scenario: Scenario, lab: ForkedLab, crew: Crew, controller: LabController, folder: Path
    ) -> None:
        super().__init__(scenario, lab, crew, folder)
        self.controller = controller
        self.controller_is_down = False

    def signal(self, process_name: str, number: signal.Signals) -> None:
        """Send a signal to the current process of a name, unless it has ended."""
        self.process(process_name).send_signal(number)

    def process(self, process_name: str) -> subprocess.Popen[bytes]:
        """Return the process of a name."""
        if process_name.startswith("rank"):
            return self.ranks[int(process_name.removeprefix("rank"))]
        if process_name.startswith("shadow"):
            return self.shadows[int(process_name.removeprefix("shadow"))].process
        return (
            self.controller.member.process if process_name == "ctl" else self.lab.switch_process(process_name)
        )

    def set_link(self, host_name: str, *, up: bool) -> None:
        """Set the switch's end of a rank's or a shadow node's first training link up or down."""
        hosts = {rank.name: rank.host for rank in self.lab.topology.ranks}
        nic = (hosts.get(host_name) or self.lab.topology.host(host_name)).interfaces[0]
        set_port(self.lab, nic.switch, nic.port, up=up)


def set_port(lab: Lab, switch: str, port: int, *, up: bool) -> None:
    """Set a port of a switch up or down."""
    with netlink(lab.namespace(switch)) as ip:
        index = ip.link_lookup(ifname=f"port{port}")[0]
        ip.link("set", index=index, state="up" if up else "down")
