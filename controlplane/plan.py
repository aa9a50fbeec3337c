"""Plans from jobs: the entries that each switch should hold, checked against the target's limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from checkmate.job.boundaries import Stream
from checkmate.job.schema import Job
from checkmate.job.tofino import chips
from controlplane import forwarding, guard, replication, streams, stub
from controlplane.entities import Holdings
from controlplane.network import Network
from controlplane.streams import StreamKey
from p4src import table_sizes

GROUPS_MAX = {"bmv2": 4096, "softswitch": 4096} | dict.fromkeys(chips.TARGETS, chips.GROUPS_MAX)
NODES_MAX = {"bmv2": 4096, "softswitch": 4096} | {
    target: chip.multicast_nodes for target, chip in chips.CHIPS.items()
}
"""Multicast groups and nodes of each target's PRE. A node is a group's copies of one instance."""
_OF_ADDRESSES = frozenset({"sources entries", "guarded_addresses entries"})
"""Items whose number depends on the hosts' addresses."""


@dataclass(frozen=True)
class SwitchPlan:
    """The entries that one switch should hold, and the streams that may connect to its stub."""

    switch: str
    holdings: Holdings
    boundary_ids: Mapping[tuple[str, int], int]
    streams: Mapping[StreamKey, Stream]

    def usage(self) -> dict[str, int]:
        """Return the number of entries per table, with every stream connected, of groups and of PRE nodes."""
        used = Counter(entry.table for entry in self.holdings.entries.values())
        used["streams"] = len(self.streams)
        used["incarnations"] = len({key[0] for key in self.streams})
        used["multicast groups"] = len(self.holdings.groups)
        used["multicast nodes"] = sum(
            len({instance for _, instance in group.replicas}) for group in self.holdings.groups.values()
        )
        return dict(used)


@dataclass(frozen=True)
class Excess:
    """A plan that needs more entries, groups or nodes than a switch holds."""

    switch: str
    target: str
    what: str
    needed: int
    limit: int

    def __str__(self) -> str:
        fewer = "addresses" if self.what in _OF_ADDRESSES else "channels, shadow nodes or replicas"
        return (
            f"switch {self.switch} ({self.target}): {self.needed} {self.what} needed, it holds {self.limit}; "
            f"use fewer {fewer}, or spread the jobs over more switches"
        )


def plan_switch(network: Network, switch: str, held: Holdings) -> SwitchPlan:
    """Return the plan of `switch` for the network's jobs, given its entries.

    Ids of boundaries and groups stay as in `held`, and so do the connected streams. The plan of a switch that
    no job names is empty.
    """
    if switch not in network.switches:
        return SwitchPlan(switch, Holdings(), {}, {})
    boundary_ids = replication.boundary_ids(network, switch, held)
    wanted = Holdings.of(
        [
            *streams.entries(network, switch, boundary_ids, held),
            *replication.entries(network, switch, boundary_ids, held),
            *stub.entries(network, switch),
            *guard.entries(network, switch),
            *forwarding.entries(network, switch),
        ]
    )
    return SwitchPlan(switch, wanted, boundary_ids, streams.streams_of(network, switch, boundary_ids))


def plan(jobs: Sequence[Job]) -> dict[str, SwitchPlan]:
    """Return the plan of every switch of the jobs, given empty switches."""
    network = Network(jobs)
    return {name: plan_switch(network, name, Holdings()) for name in network.switches}


@cache
def limits(target: str) -> Mapping[str, int]:
    """Return a target's limit for each item of `SwitchPlan.usage`: tables by P4Info, PRE by target."""
    pre = {"multicast groups": GROUPS_MAX[target], "multicast nodes": NODES_MAX[target]}
    return {**table_sizes(target), **pre}


def excesses(plan: SwitchPlan, target: str, held: Mapping[str, int]) -> list[Excess]:
    """Return those of the limits `held` that a plan exceeds."""
    return [
        Excess(plan.switch, target, what if " " in what else f"{what} entries", used, held[what])
        for what, used in sorted(plan.usage().items())
        if used > held[what]
    ]
