"""`dcb` and `ethtool` commands that extend PFC to the NICs of a Tofino's hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkmate.job.schema import Job, Nic, Rank, Switch
from checkmate.job.tofino.ports import port_settings


@dataclass(frozen=True)
class HostCommands:
    """POSIX shell commands for one interface; `$DEV` is the interface that has the address."""

    host: str
    ip: str
    switch: str
    port: str
    commands: tuple[str, ...]


def host_commands(jobs: Sequence[Job]) -> Iterator[HostCommands]:
    """Yield the commands for every rank and shadow NIC that is attached to a Tofino."""
    for job in jobs:
        switches = {switch.name: switch for switch in job.fabric.switches if switch.is_tofino}
        for name, host in job.hosts():
            if host.switch in switches:
                yield _host(name, host, switches[host.switch], job)


def _host(name: str, place: Rank | Nic, switch: Switch, job: Job) -> HostCommands:
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
