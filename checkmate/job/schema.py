"""The schema of a job's YAML file (design, section 6). `fields` has the types of single values.

Structure only. Rules between the parts of a job are in `checks`, those between jobs in `conflicts`; `files`
reads files. `validation` makes these objects of a file's data: a constructor checks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Address
from typing import Annotated, ClassVar, Final, Literal

from checkmate.job.addresses import records_beside, split_address
from checkmate.job.fields import (
    CPU_PORT,
    DSCP_BITS,
    GPUS_MOST,
    RANKS_LAST,
    After,
    Before,
    BitRate,
    Collective,
    Described,
    Dscp,
    Fec,
    FilePath,
    Flag,
    HostName,
    HostPort,
    Ip,
    Mac,
    Metres,
    Name,
    Port,
    PortName,
    Seconds,
    ShadowNodeId,
    Size,
    Source,
    Speed,
    TcpPort,
    ValueLimits,
    checked_dscp_bit,
    device_port,
    items,
    no_fewer_replicas,
    no_gradients,
    no_sending,
    whole,
)
from checkmate.job.tofino import chips
from checkmate.wire import tag as wire
from checkmate.wire.tree import FASTER_RANKS, MIN_RANKS, TREE_BYTES_MAX

JOB_VARIABLE: Final = "CHECKMATE_JOB"
"""The environment variable with the path of a script's job file, and of that of commands by default."""


NO_ADDRESS: Final = IPv4Address(0)
"""The address of a rank if no switch needs to know it."""


class Frozen:
    """A part of a file, without unknown keys."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Attachment(Frozen):
    """A port of a switch."""

    switch: Name
    port: Port


@dataclass(frozen=True, kw_only=True)
class Stub(Frozen):
    """The address of a switch's stub TCP endpoint."""

    ip: Ip
    mac: Mac
    port: TcpPort


@dataclass(frozen=True, kw_only=True)
class Tls(Frozen):
    """PEM files for the P4Runtime channel; `cert` and `key` if the switch requires them of clients."""

    ca: FilePath
    cert: FilePath | None = None
    key: FilePath | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together: give both, or neither")


@dataclass(frozen=True, kw_only=True)
class PanelPort(Frozen):
    """Settings of a port of a Tofino's front panel that differ from its board or switch."""

    device_port: Port | None = None
    speed: Speed | None = None
    fec: Fec | None = None
    cable: Metres | None = None


@dataclass(frozen=True, kw_only=True)
class Pfc(Frozen):
    """Settings for lossless delivery on a Tofino. Times in milliseconds; `cells` of buffer to divide.

    The limits of `watchdog` are those of mlx5's PFC prevention timeout, which has the same value.
    """

    watchdog: Annotated[int, whole(80, 8000)] = 200
    restore: Annotated[int, whole(100, 600_000)] = 2000
    cells: Annotated[int, whole(1)] | None = None


@dataclass(frozen=True, kw_only=True)
class Switch(Frozen):
    """A switch and the address of its P4Runtime server. Fields below `tls` are for Tofinos only."""

    name: Name
    target: Literal["softswitch", "bmv2", "tofino", "tofino2"] = "bmv2"
    address: HostPort
    device_id: Annotated[int, whole(0, (1 << 64) - 1)] = 1
    cpu_port: Annotated[int, whole(0, (1 << 9) - 1)] | None = None
    stub: Stub
    tls: Tls | None = None
    p4runtime: Literal["stratum", "pi"] = "stratum"
    front_panel: Literal["wedge100bf-32x-odd", "wedge100bf-32x-even", "wedge100bf-65x"] | None = None
    ports: Annotated[Mapping[PortName, Annotated[PanelPort, Before(device_port)]], Described(default={})] = (
        field(default_factory=dict)
    )
    speed: Speed = "100G"
    fec: Fec | None = None
    cable: Metres = 5.0
    mtu: Annotated[int, whole(1280, 9216)] = 9000
    pfc: Pfc = Pfc()

    @property
    def is_tofino(self) -> bool:
        return self.target in chips.TARGETS

    @property
    def packet_port(self) -> int:
        """The switch's port to its controller: `cpu_port`, or the default of the target."""
        if self.cpu_port is not None:
            return self.cpu_port
        return chips.cpu_port(self.target, self.front_panel) if self.is_tofino else CPU_PORT


SWITCH_KEYS: Final = tuple(member.name for member in fields(Switch))


@dataclass(frozen=True, kw_only=True)
class Fabric(Frozen):
    """The network that jobs share: switches, and links between them as pairs of ports."""

    switches: Annotated[tuple[Switch, ...], items(1)]
    links: tuple[tuple[Attachment, Attachment], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TagSettings(Frozen):
    """Settings for marking tagged segments."""

    dscp_bit: Annotated[
        int, ValueLimits(strict=True), After(checked_dscp_bit), Described(enum=[*DSCP_BITS])
    ] = wire.DEFAULT_DSCP_BIT
    priority: Annotated[int, whole(1, 7)] = 3
    """IEEE 802.1Q priority of all training traffic if PFC is used; Tofino has no PFC for 0."""


@dataclass(frozen=True, kw_only=True)
class Host(Attachment):
    """A host's interface on the training network. `addresses` are those that it has besides `ip`."""

    ip: Ip
    mac: Mac
    addresses: tuple[Ip, ...] = ()

    @property
    def sources(self) -> tuple[IPv4Address, ...]:
        """The source addresses that the host may send from at its port."""
        return (self.ip, *self.addresses)


@dataclass(frozen=True, kw_only=True)
class TrainingHost(Frozen):
    """A host with one or more ranks, and its interfaces on the training network."""

    name: Name
    mgmt: HostName | None = None
    nics: Annotated[tuple[Host, ...], items(1, 64)]


@dataclass(frozen=True, kw_only=True)
class Rank(Host):
    """A training rank: `rank` is its number in the whole job.

    A rank that names a `host` has the rest from there (`placing`). Else it is alone on a host of its own.
    """

    rank: Annotated[int, whole(0, RANKS_LAST)]
    mgmt: HostName | None = None
    host: Name | None = None
    nic: Annotated[int, whole(0)] = 0

    @property
    def place(self) -> str:
        """Its host's name or address on the management network, or else its own address, if it has one."""
        return self.mgmt or ("" if self.ip == NO_ADDRESS else str(self.ip))

    @property
    def named(self) -> str:
        """Its name in messages."""
        return f"rank {self.rank} ({self.place})" if self.place else f"rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class Mesh(Frozen):
    """The ranks of a job as a mesh, numbered row by row, the last dimension first. DP groups are replicas."""

    pp: Size = 1
    dp_replicate: Annotated[int, whole(2, RANKS_LAST + 1)]
    dp_shard: Size = 1
    tp: Size = 1


@dataclass(frozen=True, kw_only=True)
class DpGroup(Frozen):
    """A data-parallel group with its ranks in ring order. `shadow_nodes` are ids, by default all."""

    ranks: Annotated[tuple[Rank, ...], items(2)]
    shadow_nodes: Annotated[tuple[ShadowNodeId, ...], items(1, wire.SHARDS_MAX)] | (None) = None


@dataclass(frozen=True, kw_only=True)
class Nic(Host):
    """A shadow node's network interface."""


@dataclass(frozen=True, kw_only=True)
class ShadowNode(Frozen):
    """A shadow node and its one or two shadow NICs. `records` is its address for step records.

    With copies by hosts, it has no NICs, and `gradients` is its address for gradients.
    """

    id: ShadowNodeId
    mgmt: HostPort
    records: HostPort | None = None
    gradients: Annotated[HostPort | None, Before(no_gradients)] = None
    nics: Annotated[tuple[Nic, ...], items(1, 2)]

    @property
    def records_at(self) -> tuple[str, int]:
        """Host and port for step records, by default the host of `mgmt` and the port after its port."""
        return records_beside(self.mgmt) if self.records is None else split_address(self.records)

    @property
    def gradients_at(self) -> tuple[str, int]:
        """Host and port for gradients, by default the host of `mgmt` and the second port after its port."""
        if self.gradients is not None:
            return split_address(self.gradients)
        host, port = records_beside(self.mgmt)
        return host, port + 1

    @property
    def addresses(self) -> tuple[tuple[str, int], tuple[str, int], tuple[str, int]]:
        """Host and port of `mgmt`, for step records, and for gradients."""
        return split_address(self.mgmt), self.records_at, self.gradients_at


@dataclass(frozen=True, kw_only=True)
class Sending(Frozen):
    """How ranks send copies to shadow nodes, so that these do not compete with training."""

    source: Source | None = None
    """The interface, or the network of the address, from which they come."""
    limit: BitRate | None = None
    """Bits per second of all copies of a rank."""
    dscp: Dscp | None = None
    """The class of traffic of their packets."""

    @property
    def bytes_per_second(self) -> float | None:
        """The limit in bytes per second."""
        if self.limit is None:
            return None
        return float(self.limit[:-1]) * {"M": 1e6, "G": 1e9}[self.limit[-1]] / 8


DEFAULT_SENDING: Final = Sending()


@dataclass(frozen=True, kw_only=True)
class Job(Frozen):
    """One training job."""

    job: Name
    copies: Literal["switch", "host"] = "switch"
    """What copies gradients to shadow nodes: the switches of the fabric, or the hosts (`host_copies`)."""
    fabric: Fabric
    tag: TagSettings = TagSettings()
    collective: Collective = "ring"
    """What reduces gradients: Checkmate's own ring, with trees for small buckets or without, or NCCL."""
    tree_bytes: Annotated[int, whole(1, TREE_BYTES_MAX)] | None = None
    """Size of the largest buckets that go over the trees, if there are any."""
    channels: Annotated[int, whole(1, wire.CHANNELS_MAX)] = 1
    lossless: Flag = True
    """Whether no copy is lost between switches and shadow nodes (PFC); else ranks send lost ones again."""
    replicas: Annotated[int, whole(1, wire.SHARDS_MAX)] = 1
    keys: FilePath | None = None
    """The folder with the folder of this job's keys; beside the job file by default."""
    encrypt: Annotated[Flag, Before(no_sending)] = False
    """Whether streams of copies by hosts are encrypted."""
    sending: Annotated[Sending, Before(no_sending)] = DEFAULT_SENDING
    """The way of copies by hosts."""
    min_replicas: Annotated[Size | None, Before(no_fewer_replicas)] = None
    """With how many replicas of the model training goes on in place, if others are away; `None`: with all."""
    replacement_seconds: Annotated[Seconds | None, Before(no_fewer_replicas)] = None
    """How long ranks wait for others before they go on with fewer replicas."""
    hosts: tuple[TrainingHost, ...] = ()
    """Hosts that ranks name."""
    mesh: Mesh | None = None
    """What `dp_groups` were made from (`checkmate.job.mesh`)."""
    gpus_per_host: Annotated[int, whole(1, GPUS_MOST)] | None = None
    dp_groups: Annotated[tuple[DpGroup, ...], items(1)]
    shadow_nodes: Annotated[tuple[ShadowNode, ...], items(1)]

    def interfaces(self) -> Iterator[tuple[str, Host]]:
        """Yield all interfaces on the training network, with the names of their machines: `rank 0 of gpt`."""
        for group in self.dp_groups:
            for rank in group.ranks:
                if rank.host is None and rank.ip != NO_ADDRESS:
                    yield f"rank {rank.rank} of {self.job}", rank
        for host in self.hosts:
            for interface in host.nics:
                yield f"host {host.name} of {self.job}", interface
        for node in self.shadow_nodes:
            for nic in node.nics:
                yield f"shadow node {node.id} of {self.job}", nic

    @property
    def rank_count(self) -> int:
        """The number of its ranks, in all DP groups."""
        return sum(len(group.ranks) for group in self.dp_groups)

    @property
    def groups(self) -> range:
        """The indices of its DP groups."""
        return range(len(self.dp_groups))

    def groups_by_hosts(self) -> list[list[int]]:
        """Return the DP groups; those whose ranks are on the same hosts of `hosts` are together."""
        by_hosts: dict[object, list[int]] = {}
        for index, group in enumerate(self.dp_groups):
            hosts = frozenset(rank.host for rank in group.ranks)
            by_hosts.setdefault(index if None in hosts else hosts, []).append(index)
        return list(by_hosts.values())

    @property
    def min_tree_ranks(self) -> int:
        """The number of ranks from which on a DP group has trees, if `collective` has them."""
        return FASTER_RANKS if self.tree_bytes is None else MIN_RANKS

    def has_trees(self, group: int) -> bool:
        """Return whether a DP group has trees beside its ring."""
        return self.collective == "tree" and len(self.dp_groups[group].ranks) >= self.min_tree_ranks

    def stream_channels(self, group: int) -> int:
        """Return the number of channels that a DP group's streams have: of its ring, and of its trees."""
        return self.channels * (2 if self.has_trees(group) else 1)

    def shadow_list(self, group: int) -> tuple[int, ...]:
        """Return the ids of the shadow nodes that hold a DP group's shards, in the order of shards."""
        return self.dp_groups[group].shadow_nodes or tuple(node.id for node in self.shadow_nodes)

    def shards(self, group: int) -> int:
        """Return the number of shards (and shadow ids) of a DP group's model."""
        return len(self.shadow_list(group))

    def holder(self, group: int, shard: int, replication_id: int) -> ShadowNode:
        """Return holder number `replication_id` (1 .. replicas) of a shard."""
        nodes = self.shadow_list(group)
        return self.node(nodes[(shard + replication_id - 1) % len(nodes)])

    def node(self, node_id: int) -> ShadowNode:
        """Return the shadow node with an id. Raise `KeyError` if there is none."""
        for node in self.shadow_nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)
