"""Configurations for a lab's hosts: the ring's tensors, and the streams of shadow nodes. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from checkmate.job.boundaries import boundaries, first_shadow_ids, slicing
from checkmate.job.schema import Job
from checkmate.ring.place import ring_ports, tree_ports
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.wire.schedule import FIRST, Bucket, StreamName
from checkmate.wire.tree import TreeSlicing
from controlplane.network import Network
from topologies.describe.topology import BadDescription, Topology
from topologies.traffic.digests import Tail

Operation = Literal["allgather", "allreduce"]
BUCKET_BYTES: Final = 25_000_000
_DTYPES: Final = {4: "float32", 2: "bfloat16"}


@dataclass(frozen=True)
class Load:
    """The rings' traffic: `nbytes` of tensors in total, shared between DP groups, in some iterations.

    Without `tagged`, there are no tagger and no shadow nodes. Without `digest`, bytes are only counted at
    both ends. With `verify`, ranks check gathered (not reduced) tensors. They rest for `pause` seconds
    between two iterations. The tagging side digests each of `tails`, for shadow nodes that join mid-stream.
    """

    nbytes: int = 200_000_000
    iterations: int = 4
    incarnation: int = 1
    seconds: float = 600.0
    tagged: bool = True
    digest: bool = True
    verify: Literal["each", "last", "none"] = "each"
    operation: Operation = "allgather"
    pause: float = 0.0
    receive_buffer: int = RECEIVE_BUFFER
    tails: tuple[Tail, ...] = ()

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.iterations < 1:
            raise BadDescription("rings gather at least one byte, in at least one iteration")
        if not 0 <= self.incarnation <= 255:
            raise BadDescription(f"an incarnation is a number from 0 to 255, not {self.incarnation}")


def buckets(job: Job, group: int, load: Load) -> list[Bucket]:
    """Return a DP group's buckets: up to 25 MB, in each of its shards, with sizes that divide unevenly."""
    shards = job.shards(group)
    share = -(-load.nbytes // (load.iterations * len(job.dp_groups) * shards))
    per_shard = -(-share // BUCKET_BYTES)
    tree_bytes = _tree_bytes(job, group)  # larger buckets go around the ring
    sizes = list(_DTYPES)
    layout = []
    for number in range(per_shard * shards):
        size = sizes[number % len(sizes)]
        elements = max(-(-share // (per_shard * size)), (tree_bytes or 0) // size) + 3 * number + 1
        layout.append(Bucket(elements, size, number % shards))
    if tree_bytes is not None:  # a small bucket of each shard, which its trees reduce
        layout += [Bucket(tree_bytes // 8 + 1 + shard, 4, shard) for shard in range(shards)]
    return layout


def _tree_bytes(job: Job, group: int) -> int | None:
    """Return the size of the largest buckets that go over a DP group's trees; `None` if it has none."""
    cut = slicing(job, group)
    return cut.tree_bytes if isinstance(cut, TreeSlicing) else None


def gathered(job: Job, load: Load) -> int:
    """Return the number of bytes of tensors that all rings gather together."""
    groups = range(len(job.dp_groups))
    return load.iterations * sum(bucket.nbytes for g in groups for bucket in buckets(job, g, load))


def ring(job: Job, group: int, load: Load) -> dict[str, Any]:
    """Return a DP group's ring, as the configuration of `topologies.traffic.rank`."""
    first_id = first_shadow_ids(job)[group]
    trees = {}
    if (tree_bytes := _tree_bytes(job, group)) is not None:
        trees = {
            "tree_bytes": tree_bytes,
            "tree_group": len(job.dp_groups) + group,
            "tree_ports": tree_ports(job, group),
        }
    return {
        "ips": [str(rank.ip) for rank in job.dp_groups[group].ranks],
        "buckets": [
            {"elements": b.elements, "dtype": _DTYPES[b.itemsize], "shadow_id": first_id + b.shadow_id}
            for b in buckets(job, group, load)
        ],
        "ports": ring_ports(job, group),
        "channels": job.channels,
        "iterations": load.iterations,
        "seed": group,
        "incarnation": load.incarnation,
        "group": group,
        "dscp_bit": job.tag.dscp_bit,
        "timeout": load.seconds,
        "tag": load.tagged,
        "digest": load.digest,
        "verify": load.verify,
        "operation": "allreduce" if trees else load.operation,
        **trees,
        "pause": load.pause,
        "tails": [asdict(tail) for tail in load.tails],
    }


def base(job: Job, load: Load, boundary: int, channel: int, shadow_id: int, tail: Tail) -> int:
    """Return the position in a stream at which a tail begins, in bytes, computed from the schedule."""
    hop = next(hop for hop in boundaries(job) if hop.number == boundary)
    ranks = len(job.dp_groups[hop.group].ranks)
    name = StreamName(0 if hop.side == FIRST else ranks - 1, channel, shadow_id - hop.first_id)
    layout = slicing(job, hop.group).stream(buckets(job, hop.group, load), name, job.channels, ranks)
    return tail.iteration * layout.nbytes + tail.offset


def sinks(job: Job, topology: Topology, load: Load, joining: Tail | None = None) -> dict[str, dict[str, Any]]:
    """Return the configuration of `topologies.traffic.sink` for each shadow node, by host.

    A sink has no expectations: it reads from the beginning, or from the tail `joining`, until it is stopped.
    """
    network = Network([job])
    devices = {nic.ip: nic.name for host in topology.shadow_nodes for nic in host.interfaces}
    configurations: dict[str, dict[str, Any]] = {
        host.name: {
            "streams": [],
            "idle_timeout": load.seconds,
            "digest": load.digest,
            "receive_buffer": load.receive_buffer,
        }
        for host in topology.shadow_nodes
    }
    for stream in network.streams:
        stub = network.switches[stream.boundary.switch].stub
        key = (stream.boundary.number, stream.channel, stream.shadow_id)
        configurations[f"shadow{stream.node.id}"]["streams"].append(
            {
                "boundary": stream.boundary.number,
                "channel": stream.channel,
                "shadow_id": stream.shadow_id,
                "nic_ip": str(stream.nic.ip),
                "device": devices[stream.nic.ip],
                "stub_ip": str(stub.ip),
                "stub_port": stub.port,
                "incarnation": load.incarnation,
                "base": base(job, load, *key, joining) if joining else 0,
            }
        )
    return {host: sink for host, sink in configurations.items() if sink["streams"]}
