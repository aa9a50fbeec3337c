"""A job's demand beside what there is: switches, lines, cores, memory and time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from checkmate.planner.demand import Demand, NicDemand, NodeDemand
from checkmate.planner.scaling import StepTimes

TRANSCEIVERS: Final = 2
"""Of a NIC: one at either end of its cable (paper, section "Network Resource Planning")."""
CORES_MOST: Final = 512


@dataclass(frozen=True)
class SwitchUse:
    """How much of each thing a switch needs and each target holds; and its ports that the job takes."""

    switch: str
    target: str
    used: Mapping[str, int]
    targets: Mapping[str, Mapping[str, int]]
    training_ports: int
    shadow_ports: int

    @property
    def holds(self) -> Mapping[str, int]:
        """What its own target does."""
        return self.targets[self.target]


@dataclass(frozen=True)
class Limits:
    """What there is. `None`: not known, and not checked.

    `receive_bytes_per_s`: what a shadow node was measured to receive, by number of NICs.
    """

    nic_bits_per_s: float
    iteration_s: float | None = None
    node_memory: int | None = None
    cores: int | None = None
    steps: tuple[StepTimes, ...] | None = None
    receive_bytes_per_s: Mapping[int, float] | None = None


@dataclass(frozen=True)
class Capacity:
    """A job's demand beside what there is."""

    demand: Demand
    limits: Limits
    switches: tuple[SwitchUse, ...]

    @cached_property
    def streams(self) -> int:
        """TCP connections between shadow nodes and stubs."""
        return len(self.demand.streams)

    @cached_property
    def shadow_nics(self) -> int:
        """Shadow NICs in use; each takes a switch port."""
        return len(self.demand.nics)

    @property
    def ports_of_the_rule(self) -> int:
        """The paper's rule: a line for each of a DP group's two boundaries, and for each replica."""
        return 2 * len(self.demand.job.dp_groups) * self.demand.job.replicas

    def receive_seconds(self, nic: NicDemand) -> float:
        """How long a NIC takes at least for an iteration's bytes."""
        return nic.nbytes / self.receive_rate(nic.node)

    def receive_rate(self, node: int) -> float:
        """Bytes a second into one NIC's buckets: the line, or what was measured."""
        line = self.limits.nic_bits_per_s / 8
        measured = self.limits.receive_bytes_per_s
        if not measured:
            return line
        nics = sum(nic.node == node for nic in self.demand.nics)
        known = max((n for n in measured if n <= nics), default=min(measured))
        return min(line, measured[known] / known)

    def step_seconds(self, node: NodeDemand) -> float | None:
        """The predicted step of all that a node holds; one thread goes through its shards."""
        steps, cores = self.limits.steps, self.limits.cores
        if steps is None or cores is None:
            return None
        return sum(
            steps[shard.group].on(cores) * shard.elements / steps[shard.group].elements
            for shard in node.shards
        )

    def balance(self, group: int) -> float:
        """A DP group's largest shard over the mean: 1 is perfect."""
        sizes = [shard.nbytes for shard in self.demand.shards if shard.group == group]
        return max(sizes) * len(sizes) / sum(sizes)

    @property
    def unchecked(self) -> list[str]:
        """What was not checked, and what it would take."""
        found = []
        if self.limits.iteration_s is None:
            found.append("whether receiving and stepping fit in an iteration: give --iteration-time")
        elif self.limits.steps is None:
            found.append("the optimizer's step: give --profile with what checkmate profile --json printed")
        if self.limits.node_memory is None:
            found.append("the shadow nodes' memory: give --node-memory")
        return found
