"""Plans from jobs: the entries that each switch should hold, checked against the target's limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from checkmate.base.wording import counted
from checkmate.job.boundaries import Stream
from checkmate.job.schema import Job
from checkmate.job.tofino import chips
from controlplane import forwarding, guard, replication, streams, stub
from controlplane.entities import Holdings
from controlplane.network import Network
from controlplane.streams import StreamKey
from p4src import table_sizes

MAX_GROUPS = {"bmv2": 4096, "softswitch": 4096} | dict.fromkeys(chips.TARGETS, chips.GROUPS_MAX)
MAX_NODES = {"bmv2": 4096, "softswitch": 4096} | {
    target: chip.multicast_nodes for target, chip in chips.CHIPS.items()
}
"""Multicast groups and nodes of each target's PRE. A node is a group's copies of one instance."""
_FEWER_STREAMS = "use fewer channels or shadow nodes"
_FEWER_COPIES = "use fewer channels, shadow nodes or replicas"
_OTHER_BOUNDARIES = "let DP groups begin and end with ranks at other switches"
_SMALLER_FABRIC = (
    "each switch has one for every host, shadow NIC and stub of the fabric: put several ranks on a host, or "
    "jobs on fabrics of their own"
)
ADVICE: Final[Mapping[str, str]] = {
    "sources": "use fewer addresses, or spread hosts over more switches",
    "guarded_ports": "spread hosts over more switches",
    "guarded_addresses": f"use fewer addresses; {_SMALLER_FABRIC}",
    "forwarding": _SMALLER_FABRIC,
    "boundaries": _OTHER_BOUNDARIES,
    "incarnations": _OTHER_BOUNDARIES,
    "streams": f"{_FEWER_COPIES}, or {_OTHER_BOUNDARIES}",
    "lost": f"{_FEWER_COPIES}, or {_OTHER_BOUNDARIES}",
    "clients": f"{_FEWER_STREAMS}, or {_OTHER_BOUNDARIES}",
    "replication": f"{_FEWER_STREAMS}, or {_OTHER_BOUNDARIES}",
    "multicast groups": f"{_FEWER_STREAMS}, or {_OTHER_BOUNDARIES}",
    "multicast nodes": f"{_FEWER_COPIES}, or {_OTHER_BOUNDARIES}",
    "marks": "a job file can't change that",
    "stub": "a job file can't change that",
    "stub_arp": "a job file can't change that",
}
"""By item of `SwitchPlan.usage`: what makes its number smaller."""


@dataclass(frozen=True)
class SwitchPlan:
    """The entries that one switch should hold, and the streams that may connect to its stub."""

    switch: str
    holdings: Holdings
    boundary_ids: Mapping[tuple[str, int], int]
    streams: Mapping[StreamKey, Stream]

    def usage(self) -> dict[str, int]:
        """Return the number of entries per table, with every stream connected, of groups and of PRE nodes."""
        counts = Counter(entry.table for entry in self.holdings.entries.values())
        counts["streams"] = len(self.streams)
        counts["incarnations"] = len({key[0] for key in self.streams})
        counts["multicast groups"] = len(self.holdings.groups)
        counts["multicast nodes"] = sum(
            len({instance for _, instance in group.replicas}) for group in self.holdings.groups.values()
        )
        return dict(counts)


@dataclass(frozen=True)
class Excess:
    """A plan that needs more entries, groups or nodes than a switch holds."""

    switch: str
    target: str
    resource: str
    demand: int
    limit: int
    other_switches: int = 0
    """Further switches of the target with the same demand."""

    def __str__(self) -> str:
        advice = ADVICE[self.resource.removesuffix(" entries")]
        switch = (
            f"{self.switch} and {counted(self.other_switches, 'other')}"
            if self.other_switches
            else self.switch
        )
        return (
            f"switch {switch} ({self.target}): {self.demand} {self.resource} needed, it holds {self.limit}; "
            f"{advice}"
        )


def plan_switch(network: Network, switch: str, current: Holdings) -> SwitchPlan:
    """Return the plan of `switch` for the network's jobs, given its entries.

    Ids of boundaries and groups stay as in `current`, and so do the connected streams. The plan of a switch
    that no job names is empty.
    """
    if switch not in network.switches:
        return SwitchPlan(switch, Holdings(), {}, {})
    boundary_ids = replication.boundary_ids(network, switch, current)
    holdings = Holdings.from_entities(
        [
            *streams.entries(network, switch, boundary_ids, current),
            *replication.entries(network, switch, boundary_ids, current),
            *stub.entries(network, switch),
            *guard.entries(network, switch),
            *forwarding.entries(network, switch),
        ]
    )
    return SwitchPlan(switch, holdings, boundary_ids, streams.planned_streams(network, switch, boundary_ids))


def fabric_excesses(network: Network) -> list[Excess]:
    """Return limits that a fabric's size exceeds at every switch of a target, before entries are made."""
    demands = {
        "forwarding": len({host.mac for host in network.interfaces}) + len(network.switches),
        "guarded_addresses": len({ip for host in network.interfaces for ip in host.sources})
        + 2 * len(network.switches),
    }
    targets: dict[str, list[str]] = {}
    for name, switch in network.switches.items():
        targets.setdefault(switch.target, []).append(name)
    return [
        Excess(first, target, f"{table} entries", count, limits(target)[table], len(other_switches))
        for target, (first, *other_switches) in targets.items()
        for table, count in sorted(demands.items())
        if count > limits(target)[table]
    ]


def plan(jobs: Sequence[Job]) -> dict[str, SwitchPlan]:
    """Return the plan of every switch of the jobs, given empty switches."""
    network = Network(jobs)
    return {name: plan_switch(network, name, Holdings()) for name in network.switches}


@cache
def limits(target: str) -> Mapping[str, int]:
    """Return a target's limit for each item of `SwitchPlan.usage`: tables by P4Info, PRE by target."""
    pre = {"multicast groups": MAX_GROUPS[target], "multicast nodes": MAX_NODES[target]}
    return {**table_sizes(target), **pre}


def excesses(plan: SwitchPlan, target: str, capacity: Mapping[str, int]) -> list[Excess]:
    """Return the limits of `capacity` that a plan exceeds."""
    return [
        Excess(
            plan.switch,
            target,
            resource if " " in resource else f"{resource} entries",
            demand,
            capacity[resource],
        )
        for resource, demand in sorted(plan.usage().items())
        if demand > capacity[resource]
    ]
