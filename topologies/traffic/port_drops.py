"""Frames that a port of a lab's switch has dropped, which no counter in P4 sees.

The embedded target drops copies to a port that is down, or has refused them for a second, and keeps a
file of statistics in the lab's folder. BMv2 has neither.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topologies import switches
from topologies.describe.topology import LabError, SwitchNode, Topology
from topologies.lab import Lab

_FRESH_SECONDS = 30.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class PortDrops:
    """What a port has dropped since its switch was started: frames lost for good.

    `disconnected`: while it counted as not connected. `unsendable`: too long for it, or with a checksum
    that couldn't be completed. `neighbour`: who is at the other end, such as `shadow0 data1`.
    """

    switch: str
    port: int
    neighbour: str
    disconnected: int
    unsendable: int

    def __str__(self) -> str:
        reasons = ((self.disconnected, "while it was not connected"), (self.unsendable, "that it can't send"))
        said = " and ".join(
            f"{number:,} {'frame' if number == 1 else 'frames'} {why}" for number, why in reasons if number
        )
        return f"switch {self.switch} dropped at port {self.port} ({self.neighbour}): {said}"


def port_drops(lab: Lab, seconds: float = _FRESH_SECONDS, since: float | None = None) -> list[PortDrops]:
    """The ports that have dropped something until now; none on BMv2, which doesn't tell, and of a
    switch that was stopped.

    Waits for statistics taken after the call, or after `since` (as `time.time` has it): a second at most,
    where the machine isn't busy. `LabError` where a switch writes none in so many seconds.
    """
    if lab.target != "softswitch":
        return []
    deadline = time.monotonic() + seconds
    oldest = time.time() if since is None else since
    return [
        drops
        for switch in lab.switches
        if lab.runs(switch.name)
        for drops in dropped(lab.topology, switch, _statistics(lab, switch, oldest, deadline))
    ]


def dropped(topology: Topology, switch: SwitchNode, statistics: Mapping[str, Any]) -> list[PortDrops]:
    """The ports that have dropped something, from what the switch has written. Pure."""
    neighbours = _neighbours(topology, switch.name)
    found = []
    for number, counts in sorted(statistics["ports"].items(), key=lambda item: int(item[0])):
        if counts["disconnected"] or counts["unsendable"]:
            neighbour = neighbours.get(int(number), "nobody")
            found.append(
                PortDrops(switch.name, int(number), neighbour, counts["disconnected"], counts["unsendable"])
            )
    return found


def _neighbours(topology: Topology, switch: str) -> dict[int, str]:
    """Who is at the other end of each port."""
    hosts = {
        nic.port: f"{host.name} {nic.name}"
        for host in topology.hosts
        for nic in host.interfaces
        if nic.switch == switch
    }
    ends = [pair for link in topology.links for pair in ((link.a, link.b), (link.b, link.a))]
    return hosts | {near[1]: f"{far[0]} port{far[1]}" for near, far in ends if near[0] == switch}


def _statistics(lab: Lab, switch: SwitchNode, since: float, deadline: float) -> Mapping[str, Any]:
    file = switches.statistics_file(lab.directory, switch)
    while time.monotonic() < deadline:
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"time": 0}
        if found["time"] >= since:
            return found
        time.sleep(_POLL_SECONDS)
    raise LabError(f"switch {switch.name} writes no statistics any more; see {lab.log(switch.name)}")
