"""Lossless delivery to the shadow nodes: a Tofino's buffer and the settings of its ports. Pure.

Ingress stops the traffic. A port that receives training traffic has a threshold T of cells in the shared
pool, at which it asks its peer to pause, and above that its headroom H (`headroom`). So port i admits at most
T + H(i) cells. Egress cannot pause anyone and must have room for all of them. A queue holds T + H(i) for each
port i whose frames it may get. The pool that all queues share holds the sum of (T + H(i)) x c(i), where c(i)
is the largest number of copies that a multicast group makes of a frame from port i. Each copy is counted in
full, although the chip may store them once. T is the largest threshold that fits into the buffer.

Copies are made at the ranks' own switches. Traffic that reaches another switch over a link is plain unicast,
and any of it may be for a shadow port.

All frames have the chip's internal class iCoS 0 and queue 0: the program sets neither.

Headroom is the data that a lossless port must accept after it has asked its peer to pause. The sum follows
IEEE 802.1Q-2018, Annex N (buffer requirements for PFC), with the terms that SONiC uses for Tofino
(`cfgmgr/buffer_headroom_barefoot.lua` in sonic-swss). In the worst case, all of this arrives after the
threshold is reached, counted as time on the wire:

1. a frame of any class that our side has just begun to send, before the PFC frame;
2. the PFC frame itself;
3. the data in the cable, in both directions: signals travel at 198,000 km/s;
4. the data that the peer sends until it must stop (IEEE 802.3, 31B.3.7: in pause quanta of 512 bits);
5. the data in our own MAC and PHY (IEEE 802.3, clause 80: at most about 123,000 bit times at 100 Gbit/s);
6. a frame that the peer has just begun by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from checkmate.job.schema import Host, Job, Nic, Switch
from checkmate.job.tofino import chips
from checkmate.job.tofino.chips import Chip
from checkmate.job.tofino.ports import PortSettings, port_settings
from controlplane.entities import MulticastGroup
from controlplane.network import Network
from controlplane.plan import SwitchPlan

METRES_PER_SECOND = 198_000_000
ETHERNET = 18  # header and FCS
BETWEEN_FRAMES = 20  # preamble, start delimiter and the shortest gap
SHORTEST_FRAME = 64
QUANTUM = 64  # bytes
BRIDGED = 16  # bytes: the minimum that a program puts in front of a frame between ingress and egress
RESPONSE_QUANTA: Mapping[str, int] = MappingProxyType(
    {"10G": 67, "25G": 80, "40G": 118, "50G": 147, "100G": 394, "200G": 453, "400G": 905}
)
INTERFACE_BITS = 122_880  # at 100 Gbit/s and below
UNIT = 8
"""Cells; thresholds are multiples of it."""
LEAST_FRAMES = 2
"""Frames; with a smaller threshold, a port would pause its peer at almost every frame."""


@dataclass(frozen=True)
class Headroom:
    """Bytes on the wire that arrive after the threshold is reached, and the cells that hold them."""

    own_frame: int
    pfc_frame: int
    cable: int
    response: int
    interface: int
    last_frame: int
    cells: int

    @property
    def bytes(self) -> int:
        return self.own_frame + self.pfc_frame + self.cable + self.response + self.interface + self.last_frame

    def arithmetic(self) -> str:
        """Return the sum, term by term."""
        return (
            f"{self.own_frame} (own frame) + {self.pfc_frame} (PFC frame) + {self.cable} (cable, both ways) "
            f"+ {self.response} (peer's response) + {self.interface} (MAC and PHY) + {self.last_frame} "
            f"(peer's frame) = {self.bytes} bytes, {self.cells} cells at worst"
        )


def headroom(speed: str, cable: float, mtu: int, chip: Chip) -> Headroom:
    """Return the headroom of a port.

    Args:
        speed: The port's speed, such as `100G`.
        cable: Length of the cable, in metres.
        mtu: The hosts' MTU, in bytes.
        chip: The switch's chip.
    """
    bits_per_second = int(speed.removesuffix("G")) * 10**9
    frame = mtu + ETHERNET + BETWEEN_FRAMES
    faster = max(1, bits_per_second // 10**11)
    parts = (
        frame,
        SHORTEST_FRAME + BETWEEN_FRAMES,
        _round_up(2 * cable * bits_per_second, 8 * METRES_PER_SECOND),
        RESPONSE_QUANTA[speed] * QUANTUM,
        INTERFACE_BITS * faster // 8,
        frame,
    )
    cells, wire = _worst_frame(mtu, chip.cell_bytes)
    return Headroom(*parts, cells=_round_up(sum(parts) * cells, wire))


def frame_cells(frame: int, chip: Chip) -> int:
    """Return the number of cells for one frame of `frame` bytes, FCS included."""
    return _round_up(frame + BRIDGED, chip.cell_bytes)


@cache
def _worst_frame(mtu: int, cell_bytes: int) -> tuple[int, int]:
    """Return (cells, bytes on the wire) of the frame length with the most cells per byte on the wire."""
    lengths = range(SHORTEST_FRAME, mtu + ETHERNET + 1)
    worst = max(lengths, key=lambda s: _round_up(s + BRIDGED, cell_bytes) / (s + BETWEEN_FRAMES))
    return _round_up(worst + BRIDGED, cell_bytes), worst + BETWEEN_FRAMES


def _round_up(numerator: float, denominator: int) -> int:
    return int(-(-numerator // denominator))


class NoRoom(Exception):
    """The buffer is too small for lossless delivery; the message has the arithmetic."""


@dataclass(frozen=True)
class PausingPort:
    """A port at which training traffic arrives, and that asks its peer to pause."""

    port: PortSettings
    peers: tuple[str, ...]
    headroom: Headroom
    copies: int

    def admitted_cells(self, threshold: int) -> int:
        """Return the largest number of cells of its frames in the buffer at once."""
        return threshold + self.headroom.cells


@dataclass(frozen=True)
class Queue:
    """Queue 0 of a port: the cells that it must hold, and whether it leads to a shadow node."""

    port: PortSettings
    peers: tuple[str, ...]
    shadow: bool
    cells: int


@dataclass(frozen=True)
class BufferSpread:
    """Cells that the copies of a multicast group may take, for one ingress port."""

    group: int
    came_in_by: str
    ports: tuple[str, ...]
    cells: int


@dataclass(frozen=True)
class PfcPlan:
    """PFC settings of one switch, in cells of the chip's buffer."""

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
    senders: tuple[PausingPort, ...]
    queues: tuple[Queue, ...]
    groups: tuple[BufferSpread, ...]


def pfc_plan(network: Network, switch: Switch, plan: SwitchPlan, priority: int) -> PfcPlan:
    """Return the settings of `switch` for the network's jobs; raise `NoRoom` if its buffer is too small."""
    chip = chips.CHIPS[switch.target]
    peers, shadows = port_peers(network, switch.name)
    links = network.links(switch.name)
    copies = copies_by_port(network, plan)
    senders = tuple(
        PausingPort(
            port, peers[number], headroom(port.speed, port.cable, switch.mtu, chip), _most(copies, number)
        )
        for number in sorted(peers)
        if number not in shadows
        for port in (port_settings(switch, number),)
    )
    available = switch.pfc.cells or chip.free_cells
    two_frames = LEAST_FRAMES * frame_cells(switch.mtu + ETHERNET, chip)
    threshold = _threshold(switch, senders, available, two_frames)
    admitted = {sender.port.device_port: sender.admitted_cells(threshold) for sender in senders}
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
        sum(sender.admitted_cells(threshold) * sender.copies for sender in senders),
        available,
        senders,
        queues,
        tuple(_spreads(switch, copies, admitted)),
    )


def port_peers(network: Network, switch: str) -> tuple[dict[int, tuple[str, ...]], set[int]]:
    """Return the names of each used port's peers, and the ports that lead to a shadow NIC."""
    peers: dict[int, tuple[str, ...]] = {
        port: (f"switch {far}",) for port, far in network.links(switch).items()
    }
    interfaces = [
        (name, host) for job in network.jobs for name, host in job.interfaces() if host.switch == switch
    ]
    peers |= {host.port: (name,) for name, host in interfaces}
    return peers, {host.port for _, host in interfaces if isinstance(host, Nic)}


def copies_by_port(network: Network, plan: SwitchPlan) -> dict[int, list[MulticastGroup]]:
    """Return the multicast groups for frames from each port."""
    ports = {entry["boundary"]: entry["port"] for entry in plan.holdings.table("boundaries")}
    groups_by_port: dict[int, dict[int, MulticastGroup]] = {}
    for entry in plan.holdings.table("replication"):
        port = ports[entry["boundary"]]
        groups_by_port.setdefault(port, {})[entry["group"]] = plan.holdings.groups[entry["group"]]
    return {port: list(groups.values()) for port, groups in groups_by_port.items()}


def _most(copies: Mapping[int, Sequence[MulticastGroup]], port: int) -> int:
    return max((len(group.replicas) for group in copies.get(port, ())), default=1)


def _threshold(switch: Switch, senders: Sequence[PausingPort], available: int, least: int) -> int:
    """Return T: the largest threshold for which egress has room for all that ingress may admit."""
    headroom_cells = sum(sender.headroom.cells * sender.copies for sender in senders)
    shares = sum(sender.copies for sender in senders)
    threshold = (available - headroom_cells) // shares // UNIT * UNIT if senders else 0
    if senders and threshold < least:
        largest = max(senders, key=lambda sender: sender.headroom.cells)
        terms = " + ".join(f"{s.headroom.cells} x {s.copies} ({s.port.name})" for s in senders)
        raise NoRoom(
            f"switch {switch.name} ({switch.target}): no headroom left. Headroom of each port x copies: "
            f"{terms} = {headroom_cells} cells of the {available} available to PFC; "
            f"the rest is {available - headroom_cells}, "
            f"for {shares} thresholds of at least {least} cells ({LEAST_FRAMES} frames). Headroom of "
            f"{largest.port.name}: {largest.headroom.arithmetic()}. Use shorter cables, a smaller mtu, fewer "
            "replicas or ranks on this switch, or a larger pfc.cells"
        )
    return threshold


def _room(
    port: int, admitted: Mapping[int, int], copies: Mapping[int, Sequence[MulticastGroup]], plain: Set[int]
) -> int:
    """Return the cells that a port's queue may get: copies, and unicast from the ports `plain`."""
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
        for group in sorted(groups, key=lambda group: group.id)
    ]


def priority_clashes(jobs: Sequence[Job]) -> dict[str, str]:
    """Return by name the jobs that cannot share a switch because of their priorities, each with the reason.

    A switch's hosts map each DSCP to one priority. A connection's plain and tagged segments have DSCP 0 and
    `dscp_bit`; both need the same priority, or they would overtake each other.
    """
    clashes: dict[str, str] = {}
    owners: dict[tuple[str, int], Job] = {}
    for job in jobs:
        for switch in job.fabric.switches:
            for dscp in (0, job.tag.dscp_bit):
                first = owners.setdefault((switch.name, dscp), job)
                if first.tag.priority != job.tag.priority:
                    clashes.setdefault(
                        job.job,
                        f"DSCP {dscp} would have priority {job.tag.priority} here and "
                        f"{first.tag.priority} in job {first.job!r}, on switch {switch.name!r} of both; "
                        "jobs that share a switch must have the same priority",
                    )
    return clashes


@dataclass(frozen=True)
class HostCommands:
    """POSIX shell commands for one interface; `$DEV` is the interface that has the address."""

    host: str
    ip: str
    switch: str
    port: str
    commands: tuple[str, ...]


def host_commands(jobs: Sequence[Job]) -> Iterator[HostCommands]:
    """Yield the commands for every interface that is attached to a Tofino."""
    for job in jobs:
        switches = {switch.name: switch for switch in job.fabric.switches if switch.is_tofino}
        for name, host in job.interfaces():
            if host.switch in switches:
                yield _host(name, host, switches[host.switch], job)


def _host(name: str, place: Host, switch: Switch, job: Job) -> HostCommands:
    """Return a host's commands. A shadow NIC stops pausing if its host stops reading."""
    priority = job.tag.priority
    commands = [
        f"DEV=$(ip -o -4 address show to {place.ip}/32 | awk '{{print $2}}')",
        f'ip link set dev "$DEV" mtu {switch.mtu}',
        'ethtool --pause "$DEV" autoneg off rx off tx off',
        f'dcb app replace dev "$DEV" dscp-prio 0:{priority} {job.tag.dscp_bit}:{priority}',
        f'dcb pfc set dev "$DEV" prio-pfc all:off {priority}:on',
    ]
    if isinstance(place, Nic):
        commands.append(f'ethtool --set-tunable "$DEV" pfc-prevention-tout {switch.pfc.watchdog}')
    return HostCommands(
        name, str(place.ip), switch.name, port_settings(switch, place.port).name, tuple(commands)
    )
