"""A job's demand and the available resources: switches, lines, cores, memory and time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from checkmate.planner.demand import Demand, NicDemand, NodeDemand
from checkmate.planner.scaling import StepTimes

TRANSCEIVERS: Final = 2
"""Number per NIC: one at either end of its cable (paper, section "Network Resource Planning")."""


@dataclass(frozen=True)
class SwitchUse:
    """The entities that a switch needs and that each target can hold, and the ports that the job uses."""

    switch: str
    target: str
    used: Mapping[str, int]
    targets: Mapping[str, Mapping[str, int]]
    training_ports: int
    shadow_ports: int

    @property
    def holds(self) -> Mapping[str, int]:
        """Limits of its own target."""
        return self.targets[self.target]


@dataclass(frozen=True)
class CapacityLimits:
    """Available resources; `None` if unknown and not checked.

    `receive_bytes_per_s` is the measured rate of a shadow node, by number of NICs.
    """

    nic_bits_per_s: float
    iteration_s: float | None = None
    node_memory: int | None = None
    cores: int | None = None
    steps: tuple[StepTimes, ...] | None = None
    receive_bytes_per_s: Mapping[int, float] | None = None
    pcie_bits_per_s: float | None = None
    """Of a rank's GPU to the memory of its host."""
    host_memory: int | None = None
    """Pinned, for all ranks of a host."""


@dataclass(frozen=True)
class Capacity:
    """A job's demand and the available resources."""

    demand: Demand
    limits: CapacityLimits
    switches: tuple[SwitchUse, ...]

    @property
    def ports_of_the_rule(self) -> int:
        """Ports by the paper's rule: one for each of a DP group's two boundaries and each replica."""
        return 2 * len(self.demand.job.dp_groups) * self.demand.job.replicas

    def receive_seconds(self, nic: NicDemand) -> float:
        """Return the minimum time in which a NIC receives an iteration."""
        return nic.nbytes / self.receive_rate(nic.node)

    def receive_rate(self, node: int) -> float:
        """Return bytes per second into one NIC's buckets: the line rate, or a lower measured rate."""
        line = self.limits.nic_bits_per_s / 8
        measured = self.limits.receive_bytes_per_s
        if not measured:
            return line
        nics = sum(nic.node == node for nic in self.demand.nics)
        measured_nics = max((n for n in measured if n <= nics), default=min(measured))
        return min(line, measured[measured_nics] / measured_nics)

    def step_seconds(self, node: NodeDemand) -> float | None:
        """Return the predicted time of a node's steps, which one thread does for all shards in turn."""
        steps, cores = self.limits.steps, self.limits.cores
        if steps is None or cores is None:
            return None
        return sum(
            steps[shard.group].on(cores) * shard.elements / steps[shard.group].elements
            for shard in node.shards
        )

    def balance(self, group: int) -> float:
        """Return the ratio of a DP group's largest shard to the mean; 1 is optimal."""
        sizes = [shard.nbytes for shard in self.demand.shards if shard.group == group]
        return max(sizes) * len(sizes) / sum(sizes)

    @property
    def unchecked(self) -> list[str]:
        """Resources that were not checked, and the option that is missing."""
        texts = []
        if self.limits.iteration_s is None:
            texts.append("whether receiving and stepping fit in an iteration: add --iteration-time")
        elif self.limits.steps is None and not self.demand.optimizer.copied:
            texts.append("the optimizer's step: add --profile with the output of checkmate profile --json")
        if self.limits.node_memory is None:
            texts.append("the shadow nodes' memory: add --node-memory")
        return texts
