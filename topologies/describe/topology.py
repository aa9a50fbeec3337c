"""What a lab consists of: from a small YAML to hosts, switches, links and addresses. Pure but for reading it.

The YAML (`lab_file`) says where things hang; names, addresses and ports follow from their order, so a lab
looks the same each time. All labs use the same addresses: each lives in namespaces of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Final, Literal

from checkmate.job.faults import Fault, show_path
from checkmate.job.yaml_lines import JobError, Located, read_document
from topologies.describe import lab_file
from topologies.describe.lab_file import LabFile

FOLDER: Final = Path(__file__).parent.parent
DATA_NET: Final = IPv4Network("10.0.0.0/16")
MGMT_NET: Final = IPv4Network("172.31.0.0/16")
P4RUNTIME_PORT: Final = 9559
STUB_TCP_PORT: Final = 7471
SHADOW_MGMT_PORT: Final = 7000
CONTROLLER: Final = "ctl"
"""The namespace of the controller, which also holds the management network's bridge."""
CABLES: Final = "cables"
"""The namespace where training links are cut that delay."""


class LabError(Exception):
    """A lab that can't be: the message says why, and what would be right."""

    exit_code = 1


class LabInUse(LabError):
    """A lab that another process is working with."""


class BadDescription(LabError):
    """A topology, a name or an option that can't be used."""

    exit_code = 2


class BadTopology(BadDescription, JobError):
    """A topology's file that can't be used: each fault, with its place."""

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
class Host:
    """A training host or a shadow node; `number` is its global rank, or its shadow node id."""

    name: str
    role: Literal["rank", "shadow"]
    number: int
    mgmt: IPv4Address
    interfaces: tuple[Interface, ...]


@dataclass(frozen=True, slots=True)
class SwitchNode:
    """A switch: where its P4Runtime server listens, its stub, and how many ports it has (1 .. ports)."""

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
    """A cable between two switches: (switch, port) twice."""

    a: tuple[str, int]
    b: tuple[str, int]


@dataclass(frozen=True, slots=True)
class LabGroup:
    """A data-parallel group: its ranks in ring order, and its shadow nodes by id (`None`: all)."""

    ranks: tuple[Host, ...]
    shadow_nodes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Topology:
    """A lab's whole description."""

    name: str
    title: str
    channels: int
    replicas: int
    switches: tuple[SwitchNode, ...]
    links: tuple[Link, ...]
    groups: tuple[LabGroup, ...]
    shadow_nodes: tuple[Host, ...]

    @property
    def ranks(self) -> tuple[Host, ...]:
        """All training hosts, by global rank."""
        return tuple(rank for group in self.groups for rank in group.ranks)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Training hosts, then shadow nodes."""
        return (*self.ranks, *self.shadow_nodes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The name of each namespace that the lab needs."""
        return (CONTROLLER, *(s.name for s in self.switches), *(h.name for h in self.hosts))

    def host(self, name: str) -> Host:
        """The host of that name; `KeyError` where there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)


def names() -> list[str]:
    """The labs that come with Checkmate."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load(name: str) -> Topology:
    """The lab of that name, or the one that a YAML file describes; `BadDescription` where it can't be."""
    file = FOLDER / f"{name}.yaml" if name in names() else Path(name)
    if file.suffix not in (".yaml", ".yml"):
        raise BadDescription(
            f"no lab {name!r}; there are {', '.join(names())}, or give the path of a .yaml file"
        )
    try:
        document = read_document(file, "title: and switches:")
    except JobError as error:
        raise BadTopology(error.faults) from None
    return _built(file.stem, document.data, document.locate)


def build(name: str, data: object) -> Topology:
    """A lab from the data of its YAML; `BadTopology` with every fault in it."""
    return _built(name, data, lambda fault: Located(Path(name), 0, show_path(fault.path), fault.message))


def _built(name: str, data: object, locate: Callable[[Fault], Located]) -> Topology:
    lab, faults = lab_file.read(data, reserved=(CONTROLLER, CABLES))
    if lab is None:
        raise BadTopology(sorted(map(locate, faults), key=lambda fault: fault.line))
    return _Builder(lab).build(name)


@dataclass
class _Builder:
    """Hands out ports, in order of asking."""

    lab: LabFile
    used: dict[str, int] = field(default_factory=dict)

    def port(self, switch: str) -> int:
        self.used[switch] = self.used.get(switch, 0) + 1
        return self.used[switch]

    def build(self, name: str) -> Topology:
        groups = tuple(self.groups())
        shadows = tuple(self.shadow(node, nics) for node, nics in enumerate(self.lab.shadow_nodes))
        links = tuple(Link((a, self.port(a)), (b, self.port(b))) for a, b in self.lab.links)
        return Topology(
            name,
            self.lab.title,
            self.lab.channels,
            self.lab.replicas,
            tuple(self.switch(index, switch) for index, switch in enumerate(self.lab.switches)),
            links,
            groups,
            shadows,
        )

    def groups(self) -> Iterator[LabGroup]:
        number = 0
        for group in self.lab.dp_groups:
            ranks = tuple(self.rank(number + i, switch) for i, switch in enumerate(group.ranks))
            number += len(ranks)
            yield LabGroup(ranks, group.shadow_nodes)

    def rank(self, number: int, switch: str) -> Host:
        nic = Interface(
            "data0",
            DATA_NET[0x100 + number + 1],
            f"02:00:00:00:01:{number + 1:02x}",
            switch,
            self.port(switch),
        )
        # From 101 on: such addresses sort as text as they do as numbers, and torchrun sorts them as text.
        return Host(f"rank{number}", "rank", number, MGMT_NET[0x100 + number + 101], (nic,))

    def shadow(self, node: int, nics: tuple[str, ...]) -> Host:
        interfaces = tuple(
            Interface(
                f"data{i}",
                DATA_NET[0x200 + 2 * node + i + 1],
                f"02:00:00:00:02:{2 * node + i + 1:02x}",
                switch,
                self.port(switch),
            )
            for i, switch in enumerate(nics)
        )
        return Host(f"shadow{node}", "shadow", node, MGMT_NET[0x200 + node + 1], interfaces)

    def switch(self, index: int, name: str) -> SwitchNode:
        return SwitchNode(
            name,
            index + 1,
            MGMT_NET[0x300 + index + 1],
            DATA_NET[0x300 + index + 1],
            f"02:00:00:00:03:{index + 1:02x}",
            self.used.get(name, 0),
        )
