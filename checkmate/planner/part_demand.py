"""The demand of copies by hosts for a model: what each rank sends, and what comes to each node. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from checkmate.planner.demand import Demand, NicDemand
from checkmate.planner.models.named import Model
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.wire.copies import KEPT_ITERATIONS
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.parts import PartSlicing
from checkmate.wire.schedule import StreamName


@dataclass(frozen=True)
class RankDemand:
    """A rank's bytes in an iteration: its part, copied from the device, and what it sends to holders."""

    group: int
    rank: int
    part_bytes: int
    sent_bytes: int
    streams: int

    @property
    def host_memory(self) -> int:
        """Bytes of host memory for parts, pinned if gradients are on a GPU, while no node is slow."""
        return KEPT_ITERATIONS * self.sent_bytes


@dataclass(frozen=True)
class PartDemand(Demand):
    """The demand of a job with copies by hosts, each of which has `gpus_per_host` ranks behind one NIC."""

    gpus_per_host: int = field(kw_only=True)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Each DP group's layout."""
        return tuple(
            _layout(model, self.job.shards(group), self.optimizer) for group, model in enumerate(self.models)
        )

    @cached_property
    def _streams(self) -> tuple[tuple[int, int, int, int], ...]:
        """DP group, position, shard and bytes of each stream, for each holder alike."""
        streams = []
        for group, layout in enumerate(self.layouts):
            ranks = len(self.job.dp_groups[group].ranks)
            streams += [(group, *stream) for stream in _parts(layout, ranks)]
        return tuple(streams)

    @cached_property
    def ranks(self) -> tuple[RankDemand, ...]:
        """Every rank."""
        parts: Counter[tuple[int, int]] = Counter()
        streams: Counter[tuple[int, int]] = Counter()
        for group, position, _, nbytes in self._streams:
            parts[group, position] += nbytes
            streams[group, position] += 1
        replicas = self.job.replicas
        return tuple(
            RankDemand(number, rank.rank, parts[key], replicas * parts[key], replicas * streams[key])
            for number, group in enumerate(self.job.dp_groups)
            for position, rank in enumerate(group.ranks)
            for key in [(number, position)]
        )

    @cached_property
    def nics(self) -> tuple[NicDemand, ...]:
        """What comes to each node, as one NIC. Senders wait for a slow one, so its peak is the line's own."""
        nbytes: Counter[int] = Counter()
        streams: Counter[int] = Counter()
        for group, _, shard, part_bytes in self._streams:
            for holder in self._holders(group, shard):
                nbytes[holder] += part_bytes
                streams[holder] += 1
        return tuple(
            NicDemand(node.id, 0, streams[node.id], (nbytes[node.id],), (self.link_bits_per_s,))
            for node in self.job.shadow_nodes
            if streams[node.id]
        )

    @property
    def busiest_rank(self) -> RankDemand:
        """The rank that sends most."""
        return max(self.ranks, key=lambda rank: rank.sent_bytes)


@lru_cache(maxsize=256)
def _layout(model: Model, shards: int, optimizer: NamedOptimizer) -> Layout:
    """Return the layout of what ranks send: gradients, or parameters and optimizer state."""
    state = [
        Parameter(p.name, (p.elements * nbytes,), "uint8", state="state")
        for p in (model.parameters if optimizer.copied else ())
        if (nbytes := optimizer.state_bytes(p.dtype))
    ]
    return make_layout([*model.parameters, *state], shards, slicing=PartSlicing())


@lru_cache(maxsize=256)
def _parts(layout: Layout, ranks: int) -> tuple[tuple[int, int, int], ...]:
    """Return position, shard and bytes of each rank's part of each shard, without empty ones."""
    sizes: Counter[int] = Counter()
    for bucket in layout.schedule:
        sizes[bucket.shadow_id] += bucket.nbytes
    total, before, streams = sum(sizes.values()), 0, []
    for shard in sorted(sizes):
        first, stop = before * ranks // total, -(-(before + sizes[shard]) * ranks // total)
        before += sizes[shard]
        for position in range(max(first - 1, 0), min(stop + 1, ranks)):  # parts end at whole elements
            stream = layout.slicing.stream(layout.schedule, StreamName(position, 0, shard), 1, ranks)
            if stream.nbytes:
                streams.append((position, shard, stream.nbytes))
    return tuple(sorted(streams))
