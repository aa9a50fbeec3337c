"""A job's demand on its shadow nodes: bytes at each NIC in each round, memory, shards. Pure.

Sums over the job's streams, the layout's buckets and the ring's schedule (paper, section "Network Resource
Planning").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from ipaddress import IPv4Address

from checkmate.job import boundaries
from checkmate.job.mesh import replica_groups
from checkmate.job.schema import Job
from checkmate.planner.models.named import Model
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.shadow.receive.hold_plans import SETS
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.repair import sent_iterations
from checkmate.wire.schedule import RING_SLICING, Slicing
from checkmate.wire.shares import WHOLE, Share


@dataclass(frozen=True)
class NicDemand:
    """Data that one shadow NIC receives. Index 0 of the tuples is round 0 of the ring.

    `peak_bits_per_s` includes every DP group whose gradients may arrive at the same time.
    """

    node: int
    nic: int
    streams: int
    round_bytes: tuple[int, ...]
    peak_bits_per_s: tuple[float, ...]

    @property
    def nbytes(self) -> int:
        """Bytes per iteration."""
        return sum(self.round_bytes)


@dataclass(frozen=True)
class ShardDemand:
    """One shard of one DP group's model, and the nodes that hold it."""

    group: int
    shard: int
    nodes: tuple[int, ...]
    parameters: int
    elements: int
    nbytes: int
    first: str
    last: str
    largest: str
    largest_bytes: int


@dataclass(frozen=True)
class MemoryDemand:
    """Memory that a shadow node needs, in bytes.

    `reading` is the maximum of copies for checkpoint readers, `socket_buffers` the kernel's maximum while the
    node pauses. Frozen parameters, buffers such as BatchNorm's statistics, and the process itself are not
    included.
    """

    parameters: int
    optimizer_state: int
    gradients: int
    socket_buffers: int

    @property
    def reading(self) -> int:
        """A copy of everything that the next step overwrites before it has been read."""
        return self.parameters + self.optimizer_state

    @property
    def process(self) -> int:
        """Memory of the process, without the kernel's buffers and without readers."""
        return self.parameters + self.optimizer_state + self.gradients

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.process + self.socket_buffers + self.reading


@dataclass(frozen=True)
class NodeDemand:
    """The demand on a shadow node with at least one shard."""

    node: int
    shards: tuple[ShardDemand, ...]
    nics: tuple[NicDemand, ...]
    memory: MemoryDemand


@dataclass(frozen=True)
class BoundaryDemand:
    """What a rank tags in an iteration, and the host memory that it needs for repairs."""

    group: int
    side: int
    rank: int
    tagged_bytes: int
    repair_memory: int
    """0 if the job's network loses no copies."""


@dataclass(frozen=True)
class Demand:
    """The demand of a job. `models` has the stage of each DP group, of which it may have a share.

    The channels of a training rank share `link_bits_per_s`.
    """

    job: Job
    models: tuple[Model, ...]
    optimizer: NamedOptimizer
    link_bits_per_s: float
    receive_buffer: int

    @cached_property
    def _beside(self) -> dict[int, list[int]]:
        """The DP groups on the same hosts as each one."""
        return {group: groups for groups in self.job.groups_by_hosts() for group in groups}

    def together(self, group: int) -> tuple[int, ...]:
        """Return the DP groups that train a group's model, a share of it each.

        Without a mesh they are those on the same hosts that have the same model.
        """
        if self.job.mesh is not None:
            return replica_groups(self.job, group)
        return tuple(
            candidate for candidate in self._beside[group] if self.models[candidate] is self.models[group]
        )

    def share_of(self, group: int) -> Share:
        """Return what of its model a DP group has."""
        together = self.together(group)
        return Share(together.index(group), len(together))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Each DP group's layout."""
        return tuple(
            layout_of(model, self.job.shards(group), _slicing(self.job, group), self.share_of(group))
            for group, model in enumerate(self.models)
        )

    @cached_property
    def streams(self) -> tuple[boundaries.Stream, ...]:
        """Every stream of the job."""
        return tuple(boundaries.streams(self.job))

    @cached_property
    def boundary_ranks(self) -> tuple[BoundaryDemand, ...]:
        """The ranks that tag: the first and the last one of each DP group, whatever reduces its gradients."""
        sent: dict[tuple[int, int, int], dict[tuple[int, int], int]] = {}
        for stream in self.streams:
            hop = stream.boundary
            of_rank = sent.setdefault((hop.group, hop.side, hop.source.rank), {})
            of_rank[stream.channel, stream.shard] = sum(self._rounds(stream))  # once, for all holders
        return tuple(
            BoundaryDemand(
                *key,
                tagged_bytes=sum(sizes.values()),
                repair_memory=0
                if self.job.lossless
                else sum(sent_iterations(nbytes) * nbytes for nbytes in sizes.values() if nbytes),
            )
            for key, sizes in sorted(sent.items())
        )

    @cached_property
    def longest_stream(self) -> int:
        """Bytes per iteration of the longest stream."""
        return max(sum(self._rounds(stream)) for stream in self.streams)

    @cached_property
    def shards(self) -> tuple[ShardDemand, ...]:
        """All shards, by DP group."""
        return tuple(
            _shard(layout, group, number, self._holders(group, number))
            for group, layout in enumerate(self.layouts)
            for number in range(layout.shards)
        )

    @cached_property
    def nodes(self) -> tuple[NodeDemand, ...]:
        """Every shadow node that holds a shard."""
        nics: dict[int, list[NicDemand]] = {}
        for nic in self.nics:
            nics.setdefault(nic.node, []).append(nic)
        demands = []
        for node, node_nics in sorted(nics.items()):
            shards = tuple(shard for shard in self.shards if node in shard.nodes)
            demands.append(NodeDemand(node, shards, tuple(node_nics), self._memory(shards, node_nics)))
        return tuple(demands)

    @cached_property
    def nics(self) -> tuple[NicDemand, ...]:
        """Every shadow NIC that has a stream, by node."""
        of_nic: dict[tuple[int, int], list[boundaries.Stream]] = {}
        for stream in self.streams:
            key = stream.node.id, stream.node.nics.index(stream.nic)
            of_nic.setdefault(key, []).append(stream)
        return tuple(
            NicDemand(*key, len(streams), self._round_bytes(streams), self._peaks(streams))
            for key, streams in sorted(of_nic.items())
        )

    @property
    def rounds(self) -> int:
        """Number of rounds in the AllGather of the largest ring."""
        return max(len(group.ranks) for group in self.job.dp_groups) - 1

    def _holders(self, group: int, shard: int) -> tuple[int, ...]:
        job = self.job
        return tuple(job.holder(group, shard, i).id for i in range(1, job.replicas + 1))

    @cached_property
    def _of_stream(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        return {}

    def _rounds(self, stream: boundaries.Stream) -> tuple[int, ...]:
        """Return a stream's bytes in each round of its ring, which are equal for all holders of a shard."""
        boundary = stream.boundary
        key = boundary.number, stream.channel, stream.shard
        if key not in self._of_stream:
            ranks = len(self.job.dp_groups[boundary.group].ranks)
            round_bytes = [0] * (ranks - 1)
            layout = self.layouts[boundary.group]
            for bucket in layout.schedule:
                if bucket.shadow_id != stream.shard:
                    continue
                chunks = layout.slicing.tagged_chunks(
                    bucket, self.job.channels, stream.channel, ranks, boundary.side
                )
                for chunk in chunks:
                    round_bytes[chunk.round] += len(chunk.where) * bucket.itemsize
            self._of_stream[key] = tuple(round_bytes)
        return self._of_stream[key]

    def _round_bytes(self, streams: Sequence[boundaries.Stream]) -> tuple[int, ...]:
        total = [0] * self.rounds
        for stream in streams:
            for round_, nbytes in enumerate(self._rounds(stream)):
                total[round_] += nbytes
        return tuple(total)

    def _peaks(self, streams: Sequence[boundaries.Stream]) -> tuple[float, ...]:
        """Return peak rates. A boundary's channel sends to one shard at a time, at its share of the line.

        Ranks with the same address share a line, too.
        """
        sending: list[set[tuple[IPv4Address, int]]] = [set() for _ in range(self.rounds)]
        for stream in streams:
            for round_, nbytes in enumerate(self._rounds(stream)):
                if nbytes:
                    # A channel of the trees has the part of the line of the ring's channel with its number.
                    sending[round_].add((stream.boundary.source.ip, stream.channel % self.job.channels))
        channel = self.link_bits_per_s / self.job.channels
        return tuple(len(channels) * channel for channels in sending)

    def _memory(self, shards: Sequence[ShardDemand], nics: Sequence[NicDemand]) -> MemoryDemand:
        parameters = state = 0
        for shard in shards:
            layout = self.layouts[shard.group]
            for number in layout.of_shard(shard.shard):
                parameter = layout.parameters[number]
                if parameter.state:
                    state += parameter.nbytes
                    continue
                parameters += parameter.nbytes
                if not self.optimizer.copied:
                    state += parameter.elements * self.optimizer.state_bytes(parameter.dtype)
        streams = sum(nic.streams for nic in nics)
        sockets = socket_bytes(streams, self.receive_buffer)
        received = parameters + state if self.optimizer.copied else parameters
        return MemoryDemand(parameters, state, SETS * received, sockets)


def socket_bytes(streams: int, receive_buffer: int) -> int:
    """Return the memory of N streams in the kernel: twice the requested size (man 7 socket)."""
    return 2 * receive_buffer * streams


def _slicing(job: Job, group: int) -> Slicing:
    """Return how a DP group's collective cuts buckets. Versions of NCCL differ by some KiB in a stream."""
    return NcclSlicing() if job.collective == "nccl" else boundaries.slicing(job, group)


@lru_cache(maxsize=256)
def layout_of(model: Model, shards: int, slicing: Slicing = RING_SLICING, share: Share = WHOLE) -> Layout:
    """Return the layout of a model in training."""
    return make_layout(model.parameters, shards, slicing=slicing, share=share)


def _shard(layout: Layout, group: int, number: int, nodes: tuple[int, ...]) -> ShardDemand:
    parameters = [layout.parameters[i] for i in layout.of_shard(number)]
    largest = max(parameters, key=lambda parameter: parameter.nbytes, default=None)
    return ShardDemand(
        group,
        number,
        nodes,
        parameters=sum(not parameter.state for parameter in parameters),
        elements=sum(parameter.elements for parameter in parameters if not parameter.state),
        nbytes=sum(parameter.nbytes for parameter in parameters),
        first=parameters[0].name if parameters else "",
        last=parameters[-1].name if parameters else "",
        largest=largest.name if largest else "",
        largest_bytes=largest.nbytes if largest else 0,
    )
