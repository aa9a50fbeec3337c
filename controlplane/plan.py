"""Jobs to what each switch should hold, checked against the target's limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkmate.job.boundaries import Stream
from checkmate.job.schema import Job
from checkmate.job.tofino import chips
from controlplane import forwarding, replication, streams, stub
from controlplane.entities import Holdings
from controlplane.network import Network
from controlplane.streams import StreamKey

_NODES_OF_CHIPS = {target: chip.multicast_nodes for target, chip in chips.CHIPS.items()}
GROUPS_MAX = {"bmv2": 4096, "softswitch": 4096} | dict.fromkeys(chips.TARGETS, chips.GROUPS_MAX)
NODES_MAX = {"bmv2": 4096, "softswitch": 4096} | _NODES_OF_CHIPS
"""Multicast groups and nodes of each target's PRE. A node is a group's copies of one instance."""


@dataclass(frozen=True)
class SwitchPlan:
    """What one switch should hold, and the streams that may connect to its stub."""

    switch: str
    holdings: Holdings
    boundary_ids: Mapping[tuple[str, int], int]
    streams: Mapping[StreamKey, Stream]

    def usage(self) -> dict[str, int]:
        """Entries of each table, counting every stream as connected; groups and PRE nodes."""
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
    """More of something than a switch holds."""

    switch: str
    target: str
    what: str
    needed: int
    limit: int

    def __str__(self) -> str:
        return (
            f"switch {self.switch} ({self.target}): {self.needed} {self.what} needed, it holds {self.limit}; "
            "use fewer channels, shadow nodes or replicas, or spread the jobs over more switches"
        )


def plan_switch(network: Network, switch: str, held: Holdings) -> SwitchPlan:
    """What `switch` should hold for the network's jobs, given what it holds.

    Ids (boundaries, groups) stay as `held` has them, and so do the streams connected in it.
    """
    boundary_ids = replication.boundary_ids(network, switch, held)
    wanted = Holdings.of(
        [
            *streams.entries(network, switch, boundary_ids, held),
            *replication.entries(network, switch, boundary_ids, held),
            *stub.entries(network, switch),
            *forwarding.entries(network, switch),
        ]
    )
    return SwitchPlan(switch, wanted, boundary_ids, streams.streams_of(network, switch, boundary_ids))


def plan(jobs: Sequence[Job]) -> dict[str, SwitchPlan]:
    """What every switch of the jobs should hold, as if all were empty."""
    network = Network(jobs)
    return {name: plan_switch(network, name, Holdings()) for name in network.switches}


def limits(target: str, table_sizes: Mapping[str, int]) -> dict[str, int]:
    """How much of each thing in `SwitchPlan.usage` a switch holds: tables by P4Info, PRE by target."""
    pre = {"multicast groups": GROUPS_MAX[target], "multicast nodes": NODES_MAX[target]}
    return {**table_sizes, **pre}


def excesses(plan: SwitchPlan, target: str, table_sizes: Mapping[str, int]) -> list[Excess]:
    """Where a plan is larger than the switch."""
    held = limits(target, table_sizes)
    return [
        Excess(plan.switch, target, f"{what} entries" if what in table_sizes else what, used, held[what])
        for what, used in sorted(plan.usage().items())
        if used > held[what]
    ]


def empty_plan(switch: str) -> SwitchPlan:
    """What a switch without jobs should hold: nothing."""
    return SwitchPlan(switch, Holdings(), {}, {})
