"""Topologies: hosts, switches, links and addresses of a lab, from a small YAML file. Pure but for reading it.

The YAML (`lab_file`) specifies how hosts are attached. Names, addresses and ports follow from their order, so
a lab is the same each time. All labs use the same addresses, because each has namespaces of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Final, Literal

from checkmate.base.wording import did_you_mean
from checkmate.job.faults import Fault, show_path
from checkmate.job.fields import Collective
from checkmate.job.schema import Mesh
from checkmate.job.validation import data_of
from checkmate.job.yaml_lines import JobError, Located, read_document
from topologies.describe import host_copies, lab_file, lab_mesh
from topologies.describe.host_copies import BridgeLabFile
from topologies.describe.lab_file import Example, LabFile

FOLDER: Final = Path(__file__).parent.parent
DATA_NET: Final = IPv4Network("10.0.0.0/16")
MGMT_NET: Final = IPv4Network("172.31.0.0/16")
P4RUNTIME_PORT: Final = 9559
STUB_TCP_PORT: Final = 7471
SHADOW_MGMT_PORT: Final = 7000
CONTROLLER: Final = "ctl"
"""The namespace of the controller, which also holds the management network's bridge."""
CABLES: Final = "cables"
"""The namespace of the process that delays frames on training links."""


class LabError(Exception):
    """A failure in a lab; the message has the reason and the remedy."""

    exit_code = 1


class LabInUse(LabError):
    """A lab that is locked by another process."""


class BadDescription(LabError):
    """An invalid topology, name or option."""

    exit_code = 2


class BadTopology(BadDescription, JobError):
    """An invalid topology file: each fault, with its location."""

    where = "the topology"


@dataclass(frozen=True, slots=True)
class Interface:
    """A host's NIC on the training network, and the switch port that it is cabled to."""

    name: str
    ip: IPv4Address
    mac: str
    switch: str
    port: int


@dataclass(frozen=True, slots=True)
class LabHost:
    """A training host or a shadow node; `number` counts from 0, and is a shadow node's id."""

    name: str
    role: Literal["rank", "shadow"]
    number: int
    mgmt: IPv4Address
    interfaces: tuple[Interface, ...]


@dataclass(frozen=True, slots=True)
class LabRank:
    """A rank: its global number, its host, which may have others, and the index of its NIC there."""

    number: int
    host: LabHost
    nic: int = 0

    @property
    def name(self) -> str:
        """The name of its processes; that of its host, if that is its own."""
        return f"rank{self.number}"

    @property
    def mgmt(self) -> IPv4Address:
        """Its host's management address."""
        return self.host.mgmt

    @property
    def interface(self) -> Interface:
        """Its NIC."""
        return self.host.interfaces[self.nic]


@dataclass(frozen=True, slots=True)
class SwitchNode:
    """A switch: the address of its P4Runtime server, its stub, and its number of ports (1 to `ports`)."""

    name: str
    device_id: int
    mgmt: IPv4Address
    stub_ip: IPv4Address
    stub_mac: str
    ports: int

    @property
    def address(self) -> str:
        """The P4Runtime server, as host:port."""
        return f"{self.mgmt}:{P4RUNTIME_PORT}"


@dataclass(frozen=True, slots=True)
class Link:
    """A cable between two switches, with (switch, port) of each end."""

    a: tuple[str, int]
    b: tuple[str, int]


@dataclass(frozen=True, slots=True)
class LabGroup:
    """A data-parallel group: its ranks in ring order, and its shadow nodes by id (`None`: all)."""

    ranks: tuple[LabRank, ...]
    shadow_nodes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Topology:
    """The complete description of a lab."""

    name: str
    title: str
    channels: int
    replicas: int
    collective: Collective
    switches: tuple[SwitchNode, ...]
    links: tuple[Link, ...]
    groups: tuple[LabGroup, ...]
    shadow_nodes: tuple[LabHost, ...]
    mesh: Mesh | None = None
    """What `groups` were made from."""
    example: Example | None = None
    """`None` if none of Checkmate's suits the groups."""
    beside: tuple[Topology, ...] = ()
    """Further jobs on the same switches, with hosts of their own (`together`)."""
    tree_bytes: int | None = None
    """Size of the largest buckets that go over the trees, if `collective` has them."""
    lossless: bool = True
    """Whether copies are lost only by an error; else the job has ranks send them again."""

    @property
    def copies(self) -> Literal["switch", "host"]:
        """What copies gradients to shadow nodes: hosts, if all hang on the management network's bridge."""
        return "switch" if self.switches else "host"

    @property
    def jobs(self) -> tuple[Topology, ...]:
        """This job, and those beside it."""
        return (self, *self.beside)

    @property
    def script(self) -> tuple[str, ...]:
        """The script, as torchrun takes it, that trains unless another is named; empty if none suits."""
        return ("-m", f"checkmate.examples.{self.example}") if self.example else ()

    @property
    def ranks(self) -> tuple[LabRank, ...]:
        """All ranks, by number."""
        return tuple(sorted((r for group in self.groups for r in group.ranks), key=lambda rank: rank.number))

    @property
    def trainers(self) -> tuple[LabHost, ...]:
        """All training hosts, in the order of their ranks."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """Training hosts, then shadow nodes; then those of each job beside this one."""
        return (*self.trainers, *self.shadow_nodes, *(host for job in self.beside for host in job.hosts))

    @property
    def shared(self) -> bool:
        """Whether the lab lists hosts, which may have several ranks."""
        return any(rank.host.name != rank.name for rank in self.ranks)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The name of each namespace that the lab needs."""
        return (CONTROLLER, *(s.name for s in self.switches), *(h.name for h in self.hosts))

    def links_at(self, switch: str) -> list[tuple[int, str, int]]:
        """Return the links of a switch: its own port, the other switch, and the port there."""
        ends = [pair for link in self.links for pair in ((link.a, link.b), (link.b, link.a))]
        return [(port, far, far_port) for (near, port), (far, far_port) in ends if near == switch]

    def host(self, name: str) -> LabHost:
        """Return the host of that name; raise `KeyError` if there is none."""
        return {host.name: host for host in self.hosts}[name]


def names() -> list[str]:
    """Return the names of the labs that come with Checkmate."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load(name: str) -> Topology:
    """Return the lab of that name, or the lab in a YAML file; raise `BadDescription` if there is none."""
    file = FOLDER / f"{name}.yaml" if name in names() else Path(name)
    if file.suffix not in (".yaml", ".yml"):
        raise BadDescription(
            f"no lab {name!r}{did_you_mean(name, names())}; there are {', '.join(names())}, or give the path "
            "of a .yaml file"
        )
    try:
        document = read_document(file, "title: and switches:")
    except JobError as error:
        raise BadTopology(error.faults) from None
    return _builder(document.data, document.locate).build(file.stem)


def build(name: str, data: object) -> Topology:
    """Return a lab from the data of its YAML; raise `BadTopology` with every fault in it."""
    return _builder(data, _located(name)).build(name)


def together(jobs: Mapping[str, Mapping[str, Any]]) -> Topology:
    """Return the lab of the first job, with the others beside it on its switches; names of jobs are the keys.

    `jobs` are data of YAML. Only the first has `switches` and `links`; jobs with copies by hosts have none.
    Names of the second one's hosts begin with `b_`, of the third one's with `c_`. Raises `BadTopology` with
    every fault in one of them.
    """
    (name, first), *beside = jobs.items()
    shared = {key: first[key] for key in ("switches", "links") if key in first}
    main = _builder(first, _located(name))
    topologies = [main.build(name)]
    for number, (name, data) in enumerate(beside, start=1):
        whole_data = data if host_copies.is_chosen(data) else {**data, **shared}
        builder = _builder(whole_data, _located(name))
        builder.used, builder.prefix = main.used, f"{chr(ord('a') + number)}_"
        builder.come_after(tuple(host for topology in topologies for host in topology.hosts))
        topologies.append(builder.build(name, cabled=topologies[0].links))
    switches = main.switches()  # with the ports of all jobs
    whole = [
        replace(topology, switches=switches) if topology.switches else topology for topology in topologies
    ]
    return replace(whole[0], beside=tuple(whole[1:]))


def _located(name: str) -> Callable[[Fault], Located]:
    return lambda fault: Located(Path(name), 0, show_path(fault.path), fault.message)


def _builder(data: object, locate: Callable[[Fault], Located]) -> _Builder:
    """Return the builder of a lab with switches or without; raise `BadTopology` with every fault."""
    bridged: BridgeLabFile | None = None
    switched: LabFile | None = None
    if host_copies.is_chosen(data):
        bridged, faults = host_copies.read(data)
    else:
        switched, faults = lab_file.read(data, reserved=(CONTROLLER, CABLES))
    if faults:
        raise BadTopology(sorted(map(locate, faults), key=lambda fault: fault.line))
    if bridged is not None:
        return _BridgeBuilder(bridged)
    assert switched is not None
    return _SwitchBuilder(switched)


def _example(groups: Sequence[LabGroup], mesh: Mesh | None) -> Example | None:
    """Return the example that trains such groups, if one does."""
    if mesh is not None and (mesh.pp > 1 or mesh.tp > 1):
        return None
    if mesh is not None and mesh.dp_shard > 1:
        return "hsdp"
    hosts = [{rank.host.name for rank in group.ranks} for group in groups]
    if all(names == hosts[0] for names in hosts):  # one model on all ranks
        return "gpt.train"
    stages = len(groups) == 2 and len(groups[0].ranks) == len(groups[1].ranks)
    return "pipeline" if stages and hosts[0].isdisjoint(hosts[1]) else None


@dataclass
class _Builder:
    """Builder of a topology, whose hosts get names and addresses in the order of requests.

    `used` has the ports of each switch that are taken; `prefix` is for names of hosts.
    """

    used: dict[str, int] = field(default_factory=dict, kw_only=True)
    prefix: str = field(default="", kw_only=True)
    earlier: tuple[LabHost, ...] = field(default=(), kw_only=True)
    """Hosts of jobs that are there before."""
    nics: int = field(default=0, kw_only=True)
    """Training NICs so far."""

    def come_after(self, hosts: tuple[LabHost, ...]) -> None:
        """Leave the addresses of these hosts to them."""
        self.earlier = hosts
        self.nics = sum(len(host.interfaces) for host in hosts if host.role == "rank")

    def build(self, name: str, cabled: tuple[Link, ...] | None = None) -> Topology:
        """Return the topology; `cabled` are its links if they have ports already."""
        raise NotImplementedError

    def switches(self) -> tuple[SwitchNode, ...]:
        """Return the switches, with the ports that are taken so far."""
        return ()

    def port(self, switch: str) -> int:
        self.used[switch] = self.used.get(switch, 0) + 1
        return self.used[switch]

    def trainer(self, name: str, number: int, switches: tuple[str, ...]) -> LabHost:
        """Return a training host with a NIC at each of these switches."""
        nics = []
        for index, switch in enumerate(switches):
            self.nics += 1
            mac = f"02:00:00:00:01:{self.nics:02x}"
            nics.append(
                Interface(f"data{index}", DATA_NET[0x100 + self.nics], mac, switch, self.port(switch))
            )
        # Starting at 101, addresses sort as text in numerical order; torchrun sorts them as text.
        mgmt = MGMT_NET[0x100 + self.before("rank") + number + 101]
        return LabHost(f"{self.prefix}{name}", "rank", number, mgmt, tuple(nics))

    def shadow(self, node: int, nics: tuple[str, ...]) -> LabHost:
        place = self.before("shadow") + node
        interfaces = tuple(
            Interface(
                f"data{i}",
                DATA_NET[0x200 + 2 * place + i + 1],
                f"02:00:00:00:02:{2 * place + i + 1:02x}",
                switch,
                self.port(switch),
            )
            for i, switch in enumerate(nics)
        )
        name = f"{self.prefix}shadow{node}"
        return LabHost(name, "shadow", node, MGMT_NET[0x200 + place + 1], interfaces)

    def before(self, role: str) -> int:
        """Return the number of hosts of a role that there are before."""
        return sum(host.role == role for host in self.earlier)


@dataclass
class _SwitchBuilder(_Builder):
    """Builder of a lab with switches."""

    lab: LabFile

    def build(self, name: str, cabled: tuple[Link, ...] | None = None) -> Topology:
        """Return the topology, with the links' ports after those of hosts."""
        groups = tuple(self.meshed() if self.lab.mesh else self.placed() if self.lab.hosts else self.groups())
        shadows = tuple(self.shadow(node, nics) for node, nics in enumerate(self.lab.shadow_nodes))
        new = (Link((a, self.port(a)), (b, self.port(b))) for a, b in self.lab.links)
        links = tuple(new) if cabled is None else cabled
        return Topology(
            name,
            self.lab.title,
            self.lab.channels,
            self.lab.replicas,
            self.lab.collective,
            self.switches(),
            links,
            groups,
            shadows,
            self.lab.mesh,
            self.lab.example or _example(groups, self.lab.mesh),
            lossless=self.lab.lossless,
            tree_bytes=self.lab.tree_bytes,
        )

    def switches(self) -> tuple[SwitchNode, ...]:
        """Return the switches, with the ports that are taken so far."""
        return tuple(self.switch(index, switch) for index, switch in enumerate(self.lab.switches))

    def groups(self) -> Iterator[LabGroup]:
        """Yield groups whose ranks have a host each."""
        number = 0
        for group in self.lab.dp_groups:
            hosts = [
                self.trainer(f"rank{number + i}", number + i, (s,)) for i, s in enumerate(group.ranks or ())
            ]
            number += len(hosts)
            yield LabGroup(tuple(LabRank(host.number, host) for host in hosts), group.shadow_nodes)

    def placed(self) -> Iterator[LabGroup]:
        """Yield groups with ranks on the lab's hosts. Each host has the same number of ranks, in sequence."""
        hosts = self.hosts()
        per_host = sum(len(group.hosts or ()) for group in self.lab.dp_groups) // len(hosts)
        local = Counter[int]()
        for group in self.lab.dp_groups:
            ranks = []
            for number in group.hosts or ():
                nic = local[number] * len(hosts[number].interfaces) // per_host
                ranks.append(LabRank(number * per_host + local[number], hosts[number], nic))
                local[number] += 1
            yield LabGroup(tuple(ranks), group.shadow_nodes)

    def meshed(self) -> Iterator[LabGroup]:
        """Yield the groups of the lab's mesh."""
        hosts = self.hosts()
        groups, _ = lab_mesh.groups_of(data_of(self.lab, exclude_defaults=True))
        for group in groups:
            ranks = [LabRank(rank["rank"], hosts[rank["host"]], rank["nic"]) for rank in group["ranks"]]
            yield LabGroup(tuple(ranks), tuple(group["shadow_nodes"]))

    def hosts(self) -> list[LabHost]:
        """Return the hosts that the lab lists."""
        return [self.trainer(f"host{i}", i, switches) for i, switches in enumerate(self.lab.hosts)]

    def switch(self, index: int, name: str) -> SwitchNode:
        return SwitchNode(
            name,
            index + 1,
            MGMT_NET[0x300 + index + 1],
            DATA_NET[0x300 + index + 1],
            f"02:00:00:00:03:{index + 1:02x}",
            self.used.get(name, 0),
        )


@dataclass
class _BridgeBuilder(_Builder):
    """Builder of a lab with copies by hosts, which have no NICs but those of the management network."""

    lab: BridgeLabFile

    def build(self, name: str, cabled: tuple[Link, ...] | None = None) -> Topology:
        """Return the topology, without switches and links."""
        lab = self.lab
        hosts = [self.trainer(f"host{number}", number, ()) for number in range(lab.hosts)]
        groups = tuple(
            LabGroup(tuple(LabRank(rank, hosts[rank // lab.gpus_per_host]) for rank in ranks), nodes)
            for ranks, nodes in lab.groups()
        )
        mesh = None if lab.mesh is None else lab.whole_mesh
        # The example of HSDP leaves the sum over replicas to the copies of a switch.
        suitable = (
            None if mesh is not None and min(mesh.dp_replicate, mesh.dp_shard) > 1 else _example(groups, mesh)
        )
        return Topology(
            name,
            lab.title,
            channels=1,
            replicas=lab.replicas,
            collective="ring",
            switches=(),
            links=(),
            groups=groups,
            shadow_nodes=tuple(self.shadow(node, ()) for node in range(lab.shadow_nodes)),
            mesh=mesh,
            example=lab.example or suitable,
        )
