"""Lossless delivery to the shadow nodes: what a Tofino's buffer must hold, and what its ports are told. Pure.

Ingress stops the traffic: a port that training sends into has a threshold T of cells in the shared pool, at
which it asks its peer to pause, and above that its headroom (`headroom`). So what is admitted from port i is
at most T + H(i). Egress must have room for all of it, since it has nobody to pause: a queue holds T + H(i)
for each port i whose frames it may get, and the pool that all queues share holds (T + H(i)) x c(i), where
c(i) is the most copies that a multicast group makes of a frame from port i. Each copy is counted in full,
though the chip may store them once. T is what the buffer leaves.

A shadow node's copies are made at its ranks' switches: what reaches another switch over a link is plain
unicast, and any of it may be for a shadow port.

All frames have the chip's internal class iCoS 0 and queue 0: the program sets neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from checkmate.job.schema import Job, Switch
from checkmate.job.tofino import chips
from checkmate.job.tofino.ports import PortSettings, port_settings
from controlplane.entities import MulticastGroup, ip_text
from controlplane.network import Network
from controlplane.plan import SwitchPlan
from controlplane.tofino.headroom import ETHERNET, Headroom, cells_of, headroom

UNIT = 8
"""Thresholds go by 8 cells."""
LEAST_FRAMES = 2
"""A port whose threshold holds less would pause its peer at almost every frame."""


class NoRoom(Exception):
    """The buffer can't hold what lossless delivery needs; the message has the arithmetic."""


@dataclass(frozen=True)
class Sender:
    """A port that training comes in by, and so one that asks its peer to pause."""

    port: PortSettings
    peers: tuple[str, ...]
    headroom: Headroom
    copies: int

    def admitted(self, threshold: int) -> int:
        """The most cells of its frames that are in the buffer at once."""
        return threshold + self.headroom.cells


@dataclass(frozen=True)
class Queue:
    """Queue 0 of a port: the cells that it has to hold, and whether a shadow node is behind it."""

    port: PortSettings
    peers: tuple[str, ...]
    shadow: bool
    cells: int


@dataclass(frozen=True)
class BufferSpread:
    """A multicast group: for each port that its frames come in by, the cells that its copies may take."""

    group: int
    came_in_by: str
    ports: tuple[str, ...]
    cells: int


@dataclass(frozen=True)
class PfcPlan:
    """Everything that PFC needs on one switch; in cells of the chip's buffer."""

    switch: str
    target: str
    priority: int
    watchdog: int
    restore: int
    threshold: int
    hysteresis: int
    ingress_pool: int
    skid_pool: int
    egress_pool: int
    available: int
    senders: tuple[Sender, ...]
    queues: tuple[Queue, ...]
    groups: tuple[BufferSpread, ...]


def pfc_plan(network: Network, switch: Switch, plan: SwitchPlan, priority: int) -> PfcPlan:
    """What `switch` needs for the network's jobs; `NoRoom` where its buffer can't hold it."""
    chip = chips.CHIPS[switch.target]
    peers, shadows = peers_of(network, switch.name)
    links = network.links(switch.name)
    copies = copies_by_port(network, plan)
    senders = tuple(
        Sender(port, peers[number], headroom(port.speed, port.cable, switch.mtu, chip), _most(copies, number))
        for number in sorted(peers)
        if number not in shadows
        for port in (port_settings(switch, number),)
    )
    available = switch.pfc.cells or chip.free_cells
    two_frames = LEAST_FRAMES * cells_of(switch.mtu + ETHERNET, chip)
    threshold = _threshold(switch, senders, available, two_frames)
    admitted = {sender.port.device_port: sender.admitted(threshold) for sender in senders}
    queues = tuple(
        Queue(port_settings(switch, number), peers[number], number in shadows, room)
        for number in sorted(peers)
        for plain in (admitted.keys() & links if number in shadows else admitted.keys() - {number},)
        if (room := _room(number, admitted, copies, plain))
    )
    return PfcPlan(
        switch.name,
        switch.target,
        priority,
        switch.pfc.watchdog,
        switch.pfc.restore,
        threshold,
        min(two_frames, threshold // 2) // UNIT * UNIT,
        threshold * len(senders),
        sum(sender.headroom.cells for sender in senders),
        sum(sender.admitted(threshold) * sender.copies for sender in senders),
        available,
        senders,
        queues,
        tuple(_spreads(switch, copies, admitted)),
    )


def peers_of(network: Network, switch: str) -> tuple[dict[int, tuple[str, ...]], set[int]]:
    """What each used port leads to, and the ports that lead to a shadow NIC."""
    found: dict[int, tuple[str, ...]] = {}
    shadows = set()
    for port, far in network.links(switch).items():
        found[port] = (f"switch {far}",)
    for job in network.jobs:
        for group in job.dp_groups:
            for rank in group.ranks:
                if rank.switch == switch:
                    found[rank.port] = (f"rank {rank.rank} of {job.job}",)
        for node in job.shadow_nodes:
            for nic in node.nics:
                if nic.switch == switch:
                    found[nic.port] = (f"shadow node {node.id} of {job.job}",)
                    shadows.add(nic.port)
    return found, shadows


def copies_by_port(network: Network, plan: SwitchPlan) -> dict[int, list[MulticastGroup]]:
    """The multicast groups that frames which come in by a port may go to."""
    ports = {
        str(rank.ip): rank.port
        for job in network.jobs
        for group in job.dp_groups
        for rank in group.ranks
        if rank.switch == plan.switch
    }
    found: dict[int, dict[int, MulticastGroup]] = {}
    for entry in plan.holdings.table("replication"):
        port = ports[ip_text(entry["source"])]
        found.setdefault(port, {})[entry["group"]] = plan.holdings.groups[entry["group"]]
    return {port: list(groups.values()) for port, groups in found.items()}


def _most(copies: Mapping[int, Sequence[MulticastGroup]], port: int) -> int:
    return max((len(group.replicas) for group in copies.get(port, ())), default=1)


def _threshold(switch: Switch, senders: Sequence[Sender], available: int, least: int) -> int:
    """T: the most for which all that ingress may admit has room at egress, in steps of 8 cells."""
    kept = sum(sender.headroom.cells * sender.copies for sender in senders)
    shares = sum(sender.copies for sender in senders)
    threshold = (available - kept) // shares // UNIT * UNIT if senders else 0
    if senders and threshold < least:
        largest = max(senders, key=lambda sender: sender.headroom.cells)
        terms = " + ".join(f"{s.headroom.cells} x {s.copies} ({s.port.name})" for s in senders)
        raise NoRoom(
            f"switch {switch.name} ({switch.target}): no headroom left. Headroom of each port x copies: "
            f"{terms} = {kept} cells of the {available} that PFC may have; the rest is {available - kept}, "
            f"for {shares} thresholds of at least {least} cells ({LEAST_FRAMES} frames). Headroom of "
            f"{largest.port.name}: {largest.headroom.arithmetic()}. Shorter cables, a smaller mtu, fewer "
            "replicas or ranks on this switch would do, or more pfc.cells"
        )
    return threshold


def _room(
    port: int, admitted: Mapping[int, int], copies: Mapping[int, Sequence[MulticastGroup]], plain: Set[int]
) -> int:
    """What the queue of a port may be sent: copies by groups, and unicast from the ports `plain`."""
    total = 0
    for sender, cells in admitted.items():
        by_group = [sum(out == port for out, _ in group.replicas) for group in copies.get(sender, ())]
        times = max(by_group, default=0)
        if sender in plain:
            times = max(times, 1)
        total += cells * times
    return total


def _spreads(
    switch: Switch, copies: Mapping[int, Sequence[MulticastGroup]], admitted: Mapping[int, int]
) -> list[BufferSpread]:
    return [
        BufferSpread(
            group.id,
            port_settings(switch, port).name,
            tuple(port_settings(switch, out).name for out, _ in sorted(group.replicas)),
            admitted[port] * len(group.replicas),
        )
        for port, groups in sorted(copies.items())
        for group in sorted(groups, key=lambda one: one.id)
    ]


@dataclass(frozen=True)
class Clash:
    """Two jobs that want different priorities for one DSCP on a switch that both use."""

    job: str
    message: str


def priority_clashes(jobs: Sequence[Job]) -> list[Clash]:
    """A switch's hosts can map a DSCP to one priority only, and plain segments all have DSCP 0.

    The tag's bit is added to 0: a connection's plain and tagged segments have DSCP 0 and `dscp_bit`, and both
    must have one priority, or they would overtake each other.
    """
    found: list[Clash] = []
    owners: dict[tuple[str, int], Job] = {}
    for job in jobs:
        for switch in job.fabric.switches:
            for dscp in (0, job.tag.dscp_bit):
                first = owners.setdefault((switch.name, dscp), job)
                if first.tag.priority != job.tag.priority and not any(c.job == job.job for c in found):
                    found.append(
                        Clash(
                            job.job,
                            f"DSCP {dscp} would have priority {job.tag.priority} here and "
                            f"{first.tag.priority} in job {first.job!r}, on switch {switch.name!r} of both; "
                            "jobs that share a switch have one priority",
                        )
                    )
    return found
