"""Who takes part in a game day: three switches, three jobs, two controllers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tests.chaos.scenario import ModelSpec, NetworkSpec, Scenario
from topologies.describe.topology import Topology, together

ENDLESS: Final = 10**7
"""Iterations: a job trains until it is told to end."""
CHECKPOINT_INTERVAL: Final = 15
"""Iterations between two checkpoints on disk."""
PAUSE: Final = 0.15
"""Seconds between two iterations, so that two cores suffice."""


@dataclass(frozen=True)
class Party:
    """A job: its name in acts, and what it trains on which network."""

    name: str
    model: ModelSpec
    network: NetworkSpec

    def scenario(self, seed: int) -> Scenario:
        """Return what the chaos harness trains."""
        return Scenario(seed, self.model, self.network)

    @property
    def by_switch(self) -> bool:
        """Whether the switches copy its gradients, and not its hosts."""
        return self.network.copies == "switch"

    @property
    def nodes(self) -> range:
        """The ids of its shadow nodes."""
        return range(len(self.network.nodes))

    def shards(self) -> dict[tuple[int, int], frozenset[int]]:
        """Return the holders of each shard, by DP group and number."""
        holders = iter(self.network.holders())
        count = len(self.network.holders()) // self.network.shards
        return {
            (group, shard): frozenset(next(holders))
            for group in range(self.network.shards)
            for shard in range(count)
        }


DDP: Final = Party(
    "ddp",
    ModelSpec(
        parts=("norm", "dropout", "buffer", "scalar", "groups"),
        schedule="cosine",
        clip=0.5,
        iterations=ENDLESS,
        pause=PAUSE,
    ),
    NetworkSpec(switches=3, nodes=(1, 1, 1), replicas=2, every=CHECKPOINT_INTERVAL),
)
HSDP: Final = Party(
    "hsdp",
    ModelSpec(parts=("dropout", "embedding"), schedule="lambda", iterations=ENDLESS, pause=PAUSE),
    NetworkSpec(shards=2, switches=3, nodes=(1, 1), replicas=2, every=CHECKPOINT_INTERVAL),
)
FSDP: Final = Party(
    "fsdp",
    ModelSpec(parts=("dropout", "norm"), schedule="step", clip=0.5, iterations=ENDLESS, pause=PAUSE),
    NetworkSpec(
        ranks=1, shards=2, switches=0, nodes=(1, 1), replicas=2, every=CHECKPOINT_INTERVAL, copies="host"
    ),
)
"""Its hosts copy gradients, so it needs none of the switches and controllers."""
PARTIES: Final[Mapping[str, Party]] = MappingProxyType({party.name: party for party in (DDP, HSDP, FSDP)})
SWITCHES: Final = ("tor0", "tor1", "tor2")
CABLES: Final = ("tor0-tor1", "tor1-tor2")
CONTROLLERS: Final = ("ctl0", "ctl1")


def lab(name: str) -> Topology:
    """Return the lab, whose first job has the lab's name."""
    names = [name, *[*PARTIES][1:]]
    return together(
        {name: party.network.topology() for name, party in zip(names, PARTIES.values(), strict=True)}
    )
