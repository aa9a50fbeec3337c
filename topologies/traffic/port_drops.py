"""Frames dropped at the ports of a lab's switches, which P4 counters do not see.

The embedded target drops copies to a port that is down, or that has refused them for a second. It writes
statistics to the lab's folder. Other targets do neither.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkmate.base.wording import counted
from topologies import switches
from topologies.describe.topology import LabError, SwitchNode, Topology
from topologies.lab import Lab

_FRESH_SECONDS = 30.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class PortDrops:
    """Frames that a port has dropped since its switch was started.

    Attributes:
        neighbour: The other end, such as `shadow0 data1`.
        disconnected: Frames dropped while the port counted as not connected.
        unsendable: Frames that were too long, or whose checksum could not be completed.
    """

    switch: str
    port: int
    neighbour: str
    disconnected: int
    unsendable: int

    def __str__(self) -> str:
        reasons = (
            (self.disconnected, "while it was not connected"),
            (self.unsendable, "that could not be sent"),
        )
        counts = " and ".join(f"{counted(number, 'frame')} {why}" for number, why in reasons if number)
        return f"switch {self.switch} dropped at port {self.port} ({self.neighbour}): {counts}"


def port_drops(lab: Lab, seconds: float = _FRESH_SECONDS, since: float | None = None) -> list[PortDrops]:
    """Return the ports of embedded targets that have dropped frames so far; none of a stopped switch.

    Args:
        lab: The lab.
        seconds: Time for a switch to write its statistics, which it does every second.
        since: Time of the oldest usable statistics, as of `time.time`; by default now.

    Raises:
        LabError: A switch has not written its statistics in time.
    """
    if lab.target != "softswitch":
        return []
    deadline = time.monotonic() + seconds
    oldest = time.time() if since is None else since
    return [
        drops
        for switch in lab.switches
        if switch.name in lab.switch_pids
        for drops in dropped(lab.topology, switch, _statistics(lab, switch, oldest, deadline))
    ]


def dropped(topology: Topology, switch: SwitchNode, statistics: Mapping[str, Any]) -> list[PortDrops]:
    """Return the ports that have dropped frames, from a switch's statistics. Pure."""
    neighbours = _neighbours(topology, switch.name)
    ports = sorted((int(number), counts) for number, counts in statistics["ports"].items())
    return [
        PortDrops(
            switch.name,
            number,
            neighbours.get(number, "nobody"),
            disconnected=counts["disconnected"],
            unsendable=counts["unsendable"],
        )
        for number, counts in ports
        if counts["disconnected"] or counts["unsendable"]
    ]


def _neighbours(topology: Topology, switch: str) -> dict[int, str]:
    """Return the name of the other end of each port."""
    hosts = {
        nic.port: f"{host.name} {nic.name}"
        for host in topology.hosts
        for nic in host.interfaces
        if nic.switch == switch
    }
    return hosts | {
        port: f"{neighbour} port{neighbour_port}"
        for port, neighbour, neighbour_port in topology.links_at(switch)
    }


def _statistics(lab: Lab, switch: SwitchNode, since: float, deadline: float) -> Mapping[str, Any]:
    file = switches.statistics_file(lab.directory, switch)
    while time.monotonic() < deadline:
        statistics: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"time": 0}
        if statistics["time"] >= since:
            return statistics
        time.sleep(_POLL_SECONDS)
    raise LabError(f"switch {switch.name} no longer writes statistics; see {lab.log(switch.name)}")
